"""Rotary frequencies and what they are multiplied by are those of transformers, in the old and the new words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from core.blocks import RotaryEmbedding
from core.blocks.rope import context_length
from core.errors import ConfigError

HEAD_DIM = 64
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + index / 8 for index in range(HEAD_DIM // 2)],
    "long_factor": [1 + index for index in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 512,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 512},
    "llama3, the context for the original one": LLAMA3,
    "yarn": YARN,
    "yarn, betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, attention factor": {**YARN, "attention_factor": 1.25},
    "yarn, one step": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0},
    "longrope": LONGROPE,
    "longrope, factor": {**LONGROPE, "factor": 16.0},
    "longrope, attention factor": {**LONGROPE, "attention_factor": 1.25},
    "longrope, no longer than before": {**LONGROPE, "original_max_position_embeddings": 2048},
}


def config(**more: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 2048, "hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, **more}


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_a_scaling_is_that_of_transformers_in_old_and_new_words(scaling: dict[str, Any], theta: float) -> None:
    new = config(rope_parameters={**scaling, "rope_theta": theta})
    old_scaling = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    old = config(rope_theta=theta, rope_scaling=old_scaling)
    oracle = AutoConfig.for_model("llama", **new)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](oracle, torch.device("cpu"))
    for said in (new, old):
        rotary = RotaryEmbedding.from_config(said, HEAD_DIM)
        assert torch.allclose(rotary.inverse_frequencies, frequencies, rtol=1e-6)
        assert rotary.magnitude == pytest.approx(magnitude)


def test_the_magnitude_is_in_the_rotation() -> None:
    rotary = RotaryEmbedding(torch.ones(2), magnitude=2.0)
    rotated = rotary(torch.tensor([0, 3]), torch.float32)(torch.ones(2, 1, 4))
    assert torch.equal(rotated[0], torch.full((1, 4), 2.0))
    assert torch.allclose(rotated.norm(dim=-1), torch.full((2, 1), 4.0))


@pytest.mark.parametrize(
    "said", [{"partial_rotary_factor": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.25}}]
)
def test_what_is_not_rotated_stays(said: dict[str, Any]) -> None:
    rotary = RotaryEmbedding.from_config(config(**said), HEAD_DIM)
    x = torch.randn(3, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    rotated = rotary(torch.tensor([5, 6, 7]), torch.float32)(x)
    assert torch.equal(rotated[..., 16:], x[..., 16:])
    assert (rotated[..., :16] != x[..., :16]).all()


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({}, 2048),
        (SCALINGS["dynamic"], 2048),
        (SCALINGS["llama3"], 2048),
        (YARN, 2048),
        ({**YARN, "original_max_position_embeddings": 2048}, 8192),
        (LONGROPE, 512),
        ({**LONGROPE, "rope_type": "su"}, 512),
    ],
)
def test_the_context_ends_where_positions_would_turn_anew(scaling: dict[str, Any], length: int) -> None:
    assert context_length(config(rope_scaling=scaling)) == length


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "mrope"}, r"'mrope' is not supported.*default, linear, dynamic, llama3, yarn, longrope"),
        ({"rope_type": "linear"}, "no 'factor'"),
        ({"rope_type": "longrope"}, "no 'short_factor'"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor has 1 numbers.*32 frequencies"),
    ],
)
def test_what_is_not_computed_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RotaryEmbedding.from_config(config(rope_scaling=scaling), HEAD_DIM)
