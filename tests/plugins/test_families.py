"""How the configs of the families read: as published, with what they leave out, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from core_plugin_gemma.gemma import Gemma2, Gemma3
from core_plugin_llama.llama import Llama
from core_plugin_mistral.mistral import Mistral
from core_plugin_phi3.phi3 import Phi3
from core_plugin_qwen2.qwen2 import Qwen2
from core_plugin_qwen3.qwen3 import Qwen3
from transformers import AutoConfig

from core import ConfigError, TensorInfo
from core.blocks import DecoderArchitecture, DecoderShape

FAMILIES: dict[str, DecoderArchitecture] = {
    "llama": Llama(),
    "qwen2": Qwen2(),
    "qwen3": Qwen3(),
    "mistral": Mistral(),
    "gemma2": Gemma2(),
    "gemma3_text": Gemma3(),
    "phi3": Phi3(),
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 5}
FULL, SLIDING = "full_attention", "sliding_attention"


def config(model_type: str, **more: Any) -> dict[str, Any]:
    """What every published config says, and `more`; without what is None."""
    said = {
        "model_type": model_type,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
        "sliding_window": 512 if model_type.startswith("gemma") else None,
        **more,
    }
    return {key: value for key, value in said.items() if value is not None}


def shape_of(model_type: str, said: dict[str, Any]) -> DecoderShape:
    family = FAMILIES[model_type]
    return family.shape(family.read_config(said).config)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("qwen2", {}),
        ("qwen2", {"sliding_window": 1024}),
        ("qwen2", WINDOWED),
        ("qwen3", WINDOWED),
        ("qwen3", {**WINDOWED, "layer_types": [SLIDING, FULL] * 4}),
        ("gemma2", {}),
        ("gemma2", {"layer_types": [FULL] * 7 + [SLIDING]}),
        ("gemma3_text", {}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
    ],
)
def test_windows_are_where_transformers_has_them(model_type: str, more: dict[str, Any]) -> None:
    said = config(model_type, **more)
    meant = AutoConfig.for_model(**said)
    shape = shape_of(model_type, said)
    expected = [meant.sliding_window if kind == SLIDING else None for kind in meant.layer_types]
    assert [shape.window(layer) for layer in range(8)] == expected


@pytest.mark.parametrize(("model_type", "without"), [("mistral", 4096), ("phi3", None)])
@pytest.mark.parametrize("window", [None, 100])
def test_one_window_for_all_layers(model_type: str, without: int | None, window: int | None) -> None:
    shape = shape_of(model_type, {**config(model_type), "sliding_window": window, "layer_types": [FULL] * 8})
    assert {shape.window(layer) for layer in range(8)} == {window}
    assert shape_of(model_type, config(model_type)).window(7) == without


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_says(model_type: str) -> None:
    said = config(model_type)
    meant = AutoConfig.for_model(**said)
    spec, shape = FAMILIES[model_type].read_config(said), shape_of(model_type, said)
    assert spec.tied_head == meant.tie_word_embeddings
    assert shape.head_dim == (getattr(meant, "head_dim", None) or 64)
    assert shape.norm_eps == meant.rms_norm_eps
    assert shape.logit_softcap == getattr(meant, "final_logit_softcapping", None)
    assert spec.kv_width == 2 * 2 * shape.head_dim


LEFT_OUT = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rms_norm_eps sliding_window max_window_layers query_pre_attn_scalar"
)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("key", LEFT_OUT.split())
def test_each_field_that_is_left_out_is_what_transformers_has(model_type: str, key: str) -> None:
    said = config(model_type, **({**WINDOWED} if model_type.startswith("qwen") else {}))
    said.pop(key, None)
    meant = {**AutoConfig.for_model(**said).to_dict(), "use_sliding_window": said.get("use_sliding_window", False)}
    spec, expected = FAMILIES[model_type].read_config(said), FAMILIES[model_type].read_config(meant)
    assert replace(spec, config={}) == replace(expected, config={})
    assert shape_of(model_type, said) == shape_of(model_type, meant)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_head_of_its_own_is_the_head_also_if_the_config_ties_it(model_type: str) -> None:
    said, head = config(model_type, tie_word_embeddings=True), TensorInfo((1000, 256), "F32", 1024000, "x", 0)
    assert FAMILIES[model_type].read_model(said, {}).tied_head
    assert not FAMILIES[model_type].read_model(said, {"lm_head.weight": head}).tied_head


def test_gemma3_in_the_old_words() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = config("gemma3_text", rope_theta=500_000.0, rope_local_base_freq=5000.0, rope_scaling=scaling)
    meant = AutoConfig.for_model(**old).rope_parameters
    new = config("gemma3_text", rope_parameters=meant)
    assert (meant[FULL]["factor"], meant[SLIDING]["rope_theta"]) == (8.0, 5000.0)
    for said in (old, new):
        full, sliding = Gemma3().rotaries(said, 256)
        exponents = torch.arange(128) / 128
        assert torch.allclose(full.inverse_frequencies, 500_000.0**-exponents / 8, rtol=1e-5)
        assert torch.allclose(sliding.inverse_frequencies, 5000.0**-exponents, rtol=1e-5)


def test_gemma3_without_bases() -> None:
    full, sliding = Gemma3().rotaries(config("gemma3_text"), 256)
    assert full.inverse_frequencies[64] == pytest.approx(1e-3)
    assert sliding.inverse_frequencies[64] == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("model_type", "more", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping = 50\.0"),
        ("gemma2", {"layer_types": [FULL, "chunked_attention"] * 4}, "layer_types is not 8 times .*chunked_attention"),
        ("gemma2", {"layer_types": [FULL]}, "layer_types is not 8 times"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "no 'factor'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "8.0"}}, "factor': '8.0'} make no model"),
        ("mistral", {"num_hidden_layers": 2**70}, "num_hidden_layers = 1180591620717411303424 makes no model"),
        ("llama", {"head_dim": 2**33}, "head_dim = 8589934592 makes no model"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads|heads = 0 makes no model"),
        ("llama", {"hidden_size": "64"}, "hidden_size = '64' makes no model"),
        ("phi3", {"partial_rotary_factor": 1e7}, "partial_rotary_factor rotates"),
        *((each, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5") for each in FAMILIES if each != "phi3"),
        ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ("gemma3_text", {"rope_parameters": {FULL: {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor = 0.5"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' makes no model"),
        ("llama", {"attention_bias": "false"}, "attention_bias = 'false'"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
        ("llama", {"num_key_value_heads": "2"}, "num_key_value_heads = '2'"),
        ("llama", {"rope_theta": "10000"}, "rope_theta = '10000'"),
        ("qwen2", {**WINDOWED, "sliding_window": "12"}, "sliding_window = '12'"),
        ("qwen2", {"use_sliding_window": "true"}, "use_sliding_window = 'true'"),
        ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping = '30'"),
        ("gemma2", {"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar = '256'"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(model_type: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FAMILIES[model_type].read_config(config(model_type, **more))
