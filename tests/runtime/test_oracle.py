"""The pipeline's logits against transformers on the same checkpoint: any split, prefill, decode, rollback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from core import DType, Source
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.device import torch_dtype
from core.runtime.model import Model, Precision
from core.testing.checkpoints import tiny_checkpoint
from core.testing.oracle import CPU, TOLERANCE, Pipeline, oracle_logits, random_tokens, row_error, splits

DECODE_STEPS, FEW_STEPS = 32, 6
"""Where a model is cut makes no difference to how far it decodes."""
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.5, 2.0, 3.0, 4.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": 512,
    "partial_rotary_factor": 0.75,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
LATENT_YARN = {**YARN, "truncate": True, "mscale": 0.7, "mscale_all_dim": 1.1}
WINDOWED = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama-tied": {"model_type": "llama", "tied": True},
    "llama-untied-biased": {"model_type": "llama", "tied": False, "attention_bias": True},
    "llama-full-heads": {"model_type": "llama", "heads": 4, "kv_heads": 4},
    "llama-one-kv-head": {"model_type": "llama", "heads": 4, "kv_heads": 1},
    "llama-wide-heads": {"model_type": "llama", "heads": 4, "kv_heads": 2, "head_dim": 32},
    "llama-rope-scaled": {"model_type": "llama", "rope_scaling": LLAMA3_SCALING},
    "llama-sharded": {"model_type": "llama", "shards": 3},
    "qwen2-tied": {"model_type": "qwen2", "tied": True},
    "qwen2-untied": {"model_type": "qwen2", "tied": False, "shards": 2},
    "qwen2-windowed": {"model_type": "qwen2", "config": WINDOWED},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-windowed-biased": {"model_type": "qwen3", "tied": False, "attention_bias": True, "config": WINDOWED},
    "mistral": {"model_type": "mistral", "tied": False},
    "mistral-no-window": {"model_type": "mistral", "config": {"sliding_window": None}},
    "gemma2": {"model_type": "gemma2", "head_dim": 32},
    "gemma3": {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "phi3-windowed": {"model_type": "phi3", "tied": False, "config": {"sliding_window": 47}},
    "phi3-longrope": {
        "model_type": "phi3",
        "rope_scaling": LONGROPE,
        "max_position_embeddings": 4096,
        "config": {"original_max_position_embeddings": 512},
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 32},
    "qwen3_moe-fused-windowed-biased": {
        "model_type": "qwen3_moe",
        "tied": False,
        "attention_bias": True,
        "fused_experts": True,
        "config": {**WINDOWED, "mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False},
    },
    "mixtral": {"model_type": "mixtral", "tied": False},
    "mixtral-fused-windowed": {"model_type": "mixtral", "fused_experts": True, "config": {"sliding_window": 16}},
    "qwen2_moe": {"model_type": "qwen2_moe", "tied": False},
    "qwen2_moe-fused-windowed": {
        "model_type": "qwen2_moe",
        "fused_experts": True,
        "config": {**WINDOWED, "max_window_layers": 3, "mlp_only_layers": [3], "qkv_bias": False},
    },
    "glm4_moe": {"model_type": "glm4_moe", "tied": False},
    "glm4_moe-biased": {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "fused_experts": True,
        "config": {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "first_k_dense_replace": 2},
    },
    "deepseek_v2": {"model_type": "deepseek_v2", "tied": False},
    "deepseek_v2-lite": {
        "model_type": "deepseek_v2",
        "rope_scaling": LATENT_YARN,
        "attention_bias": True,
        "config": {"topk_method": "greedy", "q_lora_rank": None, "v_head_dim": 20, "mlp_bias": True},
    },
    "deepseek_v3": {"model_type": "deepseek_v3", "tied": False, "rope_scaling": LATENT_YARN},
    "deepseek_v3-not-interleaved": {
        "model_type": "deepseek_v3",
        "attention_bias": True,
        "fused_experts": True,
        "config": {"rope_interleave": False, "norm_topk_prob": False, "first_k_dense_replace": 3},
    },
    "gpt_oss": {"model_type": "gpt_oss", "tied": False, "rope_scaling": YARN},
    "gpt_oss-unbiased": {
        "model_type": "gpt_oss",
        "attention_bias": False,
        "seed": 1,
        "config": {"layer_types": ["full_attention", "sliding_attention"] * 2, "swiglu_alpha": 1.2},
    },
}


@contextmanager
def opened(path: Path, dtype: DType, wire: DType) -> Iterator[tuple[Model, Precision]]:
    plugins = PluginHost.installed()
    with Model.open(Source(str(path)), plugins) as model:
        yield model, Precision(plugins.quantizers.get("fp16"), dtype, wire)


@pytest.fixture(scope="module", params=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp(request.param), layers=4, **VARIANTS[request.param])


@pytest.mark.parametrize("dtype", list(DType))
def test_every_split_has_the_oracles_logits(checkpoint: Path, dtype: DType) -> None:
    prompt_length = 40
    tokens = random_tokens(prompt_length + DECODE_STEPS, seed=7)
    expected = oracle_logits(checkpoint, torch_dtype(dtype), tokens)
    assert expected.std() > 0.1, "flat logits would agree with anything"
    bound = TOLERANCE[dtype] * float(expected.std())
    with opened(checkpoint, dtype, dtype) as (model, precision):
        every = splits(model.spec.layers)
        for ranges in every if dtype is DType.FP32 else every[::3]:
            run = Pipeline.of(model, precision, ranges)
            end = prompt_length + (DECODE_STEPS if len(ranges) == 1 else FEW_STEPS)
            steps = [run(tokens[:prompt_length], 0)]
            steps += [run([tokens[i]], i) for i in range(prompt_length, end)]
            assert row_error(torch.cat(steps), expected[:end], model, dtype) < bound, ranges
            again = run(tokens[20:30], 20)
            assert row_error(again, expected[20:30], model, dtype) < bound, f"{ranges} after a rollback"
            assert all(stage.caches.tokens == 30 for stage in run.stages)


def test_a_head_of_its_own_beside_a_config_that_ties_it_is_the_oracles_head(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, tied=False, layers=2)
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**said, "tie_word_embeddings": True}))
    tokens = list(range(20, 40))
    expected = oracle_logits(path, torch.float32, tokens)
    with opened(path, DType.FP32, DType.FP32) as (model, precision):
        logits = Pipeline.of(model, precision, [range(0, 2)])(tokens, 0)
    assert (logits - expected).abs().max() < 1e-3


def test_chunked_prefill_and_interleaved_sessions_change_nothing(checkpoint: Path) -> None:
    generator = torch.Generator().manual_seed(8)
    first, second = torch.randint(0, 250, (2, 300), generator=generator).tolist()
    with opened(checkpoint, DType.FP32, DType.FP32) as (model, precision):
        run = Pipeline.of(model, precision, [range(0, 2), range(2, 4)])
        chunks: dict[int, list[torch.Tensor]] = {1: [], 2: []}
        for start in range(0, 300, 60):
            chunks[1].append(run(first[start : start + 60], start, session=1))
            chunks[2].append(run(second[start : start + 60], start, session=2))
    for session, tokens in ((1, first), (2, second)):
        expected = oracle_logits(checkpoint, torch.float32, tokens)
        assert (torch.cat(chunks[session]) - expected).abs().max() < 1e-3


def test_a_batch_of_many_sessions_equals_each_alone(checkpoint: Path) -> None:
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, 250, (n,), generator=generator).tolist() for n in (3, 17, 1)]
    with opened(checkpoint, DType.FP32, DType.FP32) as (model, precision):
        run = Pipeline.of(model, precision, [range(0, 4)])
        alone = torch.cat([run(tokens, 0, session=10 + i) for i, tokens in enumerate(prompts)])
        pieces = [Segment(i, 0, len(tokens), len(tokens)) for i, tokens in enumerate(prompts)]
        with torch.inference_mode():
            hidden = run.embed_and_head.embed(torch.tensor([t for tokens in prompts for t in tokens]))
            together = run.embed_and_head.logits(run.stages[0].run(hidden, pieces, outputs_only=False))
    assert (alone - together).abs().max() < 1e-4


def test_layers_leave_what_arrived_as_it_was(checkpoint: Path) -> None:
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(10))
    arrived = hidden.clone()
    with opened(checkpoint, DType.FP32, DType.FP32) as (model, precision):
        stage, _ = model.load_stage(range(0, 4), precision, CPU)
        result = stage.run(arrived, [Segment(1, 0, 3, 3)], outputs_only=False)
    assert torch.equal(arrived, hidden) and not torch.equal(result, hidden)
