"""How the configs of families with experts read: as published, with what they leave out, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_plugin_deepseek.deepseek import DeepseekV2, DeepseekV3
from core_plugin_glm4_moe.glm4_moe import Glm4Moe
from core_plugin_gpt_oss.gpt_oss import YARN, GptOss, clamped_gate
from core_plugin_mixtral.mixtral import Mixtral
from core_plugin_qwen_moe.qwen_moe import Qwen2Moe, Qwen3Moe
from transformers import AutoConfig

from core import ConfigError
from core.blocks import DecoderArchitecture, Latent, Mixture

FAMILIES: dict[str, DecoderArchitecture] = {
    "qwen2_moe": Qwen2Moe(),
    "qwen3_moe": Qwen3Moe(),
    "mixtral": Mixtral(),
    "gpt_oss": GptOss(),
    "glm4_moe": Glm4Moe(),
    "deepseek_v2": DeepseekV2(),
    "deepseek_v3": DeepseekV3(),
}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 128},
    "qwen2_moe": {"num_experts": 16, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
    "mixtral": {"num_local_experts": 16},
    "glm4_moe": {"n_routed_experts": 16, "moe_intermediate_size": 128},
    "deepseek_v2": {"n_routed_experts": 16, "moe_intermediate_size": 128},
    "deepseek_v3": {"n_routed_experts": 16, "moe_intermediate_size": 128},
    "gpt_oss": {"num_local_experts": 16},
}
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
        "num_experts_per_tok": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
        **EXPERTS[model_type],
        **more,
    }
    return {key: value for key, value in said.items() if value is not None}


def mixture(model_type: str, **more: Any) -> Mixture:
    found = FAMILIES[model_type].shape(config(model_type, **more)).mixture
    assert found is not None
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_says(model_type: str) -> None:
    said = config(model_type)
    meant = AutoConfig.for_model(**said)
    spec, shape = FAMILIES[model_type].read_config(said), FAMILIES[model_type].shape(said)
    assert spec.tied_head == meant.tie_word_embeddings
    assert shape.head_dim == (getattr(meant, "head_dim", None) or 64)
    assert shape.norm_eps == meant.rms_norm_eps
    assert shape.mlp_bias == getattr(meant, "mlp_bias", False)
    assert shape.qkv_bias == getattr(meant, "qkv_bias", getattr(meant, "attention_bias", False))
    assert shape.output_bias == (getattr(meant, "attention_bias", False) and model_type != "glm4_moe")
    assert mixture(model_type).normalised == getattr(meant, "norm_topk_prob", True)
    assert mixture(model_type).scale == getattr(meant, "routed_scaling_factor", 1.0)
    assert len(mixture(model_type).dense_layers) == getattr(meant, "first_k_dense_replace", 0)
    assert mixture(model_type).shared_size == 128 * getattr(meant, "n_shared_experts", 2 * (model_type == "qwen2_moe"))
    assert (mixture(model_type).experts, mixture(model_type).chosen) == (16, 4)
    rotary, _ = FAMILIES[model_type].rotaries({**FAMILIES[model_type].defaults, **said}, 64)
    rotated = 64 * meant.rope_parameters.get("partial_rotary_factor", 1.0)
    assert 2 * len(rotary.inverse_frequencies) == rotated
    slowest = meant.rope_parameters["rope_theta"] ** (2 / rotated - 1) / meant.rope_parameters.get("factor", 1.0)
    assert rotary.inverse_frequencies[-1] == pytest.approx(slowest)


@pytest.mark.parametrize(
    ("model_type", "more", "expected"),
    [
        ("qwen3_moe", {"sliding_window": 100}, [None] * 8),
        ("qwen3_moe", {"sliding_window": 100, "use_sliding_window": True, "layer_types": [FULL] * 8}, [100] * 8),
        ("qwen3_moe", {"use_sliding_window": True}, [4096] * 8),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 5}, [4096, None] * 3 + [None] * 2),
        ("qwen2_moe", {"sliding_window": 100, "layer_types": [SLIDING] * 8}, [None] * 8),
        ("mixtral", {}, [None] * 8),
        ("mixtral", {"sliding_window": 100}, [100] * 8),
        ("gpt_oss", {}, [128, None] * 4),
        ("gpt_oss", {"sliding_window": 100, "layer_types": [FULL] * 7 + [SLIDING]}, [None] * 7 + [100]),
    ],
)
def test_windows_are_where_transformers_has_them(model_type: str, more: dict[str, Any], expected: list[Any]) -> None:
    shape = FAMILIES[model_type].shape(config(model_type, **more))
    assert [shape.window(layer) for layer in range(8)] == expected


def test_experts_are_where_transformers_has_them() -> None:
    assert mixture("qwen3_moe").dense_layers == set()
    some = mixture("qwen3_moe", decoder_sparse_step=3, mlp_only_layers=[2])
    assert some.dense_layers == {0, 1, 2, 3, 4, 6, 7}
    assert mixture("glm4_moe").dense_layers == {0}
    assert mixture("glm4_moe", first_k_dense_replace=2**70).dense_layers == set(range(8))


def test_latents_are_as_wide_as_transformers_says() -> None:
    for model_type in ("deepseek_v2", "deepseek_v3"):
        said = config(model_type)
        meant, shape = AutoConfig.for_model(**said), FAMILIES[model_type].shape(said)
        assert shape.latent == Latent(
            rank=meant.kv_lora_rank,
            rotated=meant.qk_rope_head_dim,
            plain=meant.qk_nope_head_dim,
            value=meant.v_head_dim,
            query_rank=meant.q_lora_rank,
        )
        assert FAMILIES[model_type].read_config(said).kv_width == 576
        assert FAMILIES[model_type].shape({**said, "q_lora_rank": None}).latent.query_rank == 0


def test_groups_are_what_transformers_says() -> None:
    assert (mixture("deepseek_v3").groups, mixture("deepseek_v3").groups_chosen) == (8, 4)
    assert mixture("deepseek_v2", n_group=4, topk_group=2).groups == 1
    limited = mixture("deepseek_v2", n_group=4, topk_group=2, topk_method="group_limited_greedy")
    assert (limited.groups, limited.groups_chosen, limited.group_leaders) == (4, 2, 1)


def test_a_lengthened_context_sharpens_attention() -> None:
    published = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    shape = DeepseekV3().shape(config("deepseek_v3", rope_scaling=published))
    assert shape.attention_scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)


def test_transformers_own_name_for_the_number_of_experts() -> None:
    assert mixture("qwen3_moe", num_experts=None, num_local_experts=8).experts == 8


def test_gpt_oss_without_a_scaling_has_yarn() -> None:
    rotary, _ = GptOss().rotaries({**GptOss.defaults, **config("gpt_oss")}, 64)
    said, _ = GptOss().rotaries(config("gpt_oss", rope_scaling=YARN, rope_theta=150_000.0), 64)
    assert torch.equal(rotary.inverse_frequencies, said.inverse_frequencies)
    assert rotary.magnitude == said.magnitude > 1


def test_a_gate_is_clamped_on_one_side_and_what_it_lets_through_on_both() -> None:
    gate, up = torch.tensor([-9.0, -1.0, 9.0]), torch.tensor([1.0, -9.0, 9.0])
    expected = torch.tensor([-9.0, -1.0, 7.0]) * torch.tensor([2.0, -6.0, 8.0])
    expected *= torch.sigmoid(1.702 * torch.tensor([-9.0, -1.0, 7.0]))
    found = clamped_gate(torch.stack((gate, up), dim=-1).view(1, 6), 1.702, 7.0)
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize(
    ("model_type", "more", "message"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("qwen3_moe", {"num_experts": None}, "experts = None makes no model"),
        ("qwen3_moe", {"num_experts": 2**40}, "experts = 1099511627776 makes no model"),
        ("qwen3_moe", {"num_experts_per_tok": 17}, "17 of 16 experts can't be chosen"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "no 'moe_intermediate_size'"),
        ("qwen3_moe", {"num_hidden_layers": 2**70, "decoder_sparse_step": 2}, "num_hidden_layers = .* makes no model"),
        ("mixtral", {"num_experts_per_tok": None}, "no 'num_experts_per_tok'"),
        ("glm4_moe", {"n_group": 3}, "4 of 16 experts can't be chosen: from 1 of 3 groups"),
        ("glm4_moe", {"n_group": 8}, "4 of 16 experts can't be chosen: from 1 of 8 groups"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "no 'n_group'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek_v3", {"v_head_dim": 200}, "values of 200 behind keys of 192"),
        ("deepseek_v3", {"kv_lora_rank": 2**40}, "rank = 1099511627776 makes no model"),
        ("gpt_oss", {"layer_types": [SLIDING]}, "layer_types is not 8 times"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(model_type: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FAMILIES[model_type].read_config(config(model_type, **more))
