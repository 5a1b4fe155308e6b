"""What a GGUF file's metadata say of the model: read, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from core_plugin_gguf.checkpoint import GgufFormat

from core import Checkpoint, CheckpointError, Source
from core.runtime.sampling_params import advised
from core.testing.checkpoints import tiny_checkpoint, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    return write_gguf(tiny_checkpoint(directory / "original", layers=2), directory / "tiny.gguf")


def opened(path: Path) -> Checkpoint:
    return GgufFormat().open(Source(str(path)))


def rewritten(file: Path, change: Callable[[gguf.GGUFWriter], None], directory: Path) -> Path:
    """`file` with other metadata: each key that `change` adds stands in for the one that was there."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(directory / "rewritten.gguf", "llama")
    change(writer)
    changed = set(writer.kv_data[0])
    for key, field in reader.fields.items():
        if key not in changed and not key.startswith("GGUF."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / "rewritten.gguf"


def test_the_makers_advice_on_how_to_draw_is_read(tiny: Path, tmp_path: Path) -> None:
    def advise(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.penalty_repeat", 1.25)
        writer.add_int32("general.sampling.mirostat", 0)

    advice = advised(opened(rewritten(tiny, advise, tmp_path)).generation_config)
    assert advice == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}
    assert advised(opened(tiny).generation_config) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_string("general.architecture", "gemma2"), r"'gemma2'.*llama, qwen2, qwen3"),
        (lambda w: w.add_uint16("split.count", 3), r"one of 3 parts.*model-00001-of-00003\.gguf"),
        (lambda w: w.add_uint32("llama.expert_count", 8), "mixture of experts"),
        (lambda w: w.add_head_count_kv([2, 1]), r"differ in their attention\.head_count_kv"),
        (lambda w: w.add_head_count(0), r"attention\.head_count is 0"),
        (lambda w: w.add_string("llama.block_count", "two"), "block_count is two"),
        (lambda w: w.add_float32("llama.block_count", 1.5), r"block_count is 1\.5"),
        (lambda w: w.add_rope_dimension_count(8), "rotated in part"),
        (lambda w: w.add_value_length(8), "values differ"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope'"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), r"does not say .*rope\.scaling\.factor"),
        (lambda w: w.add_float32("llama.rope.scaling.attn_factor", 1.2), r"rope\.scaling\.attn_factor 1\.2"),
        (lambda w: w.add_logit_scale(0.5), r"logit_scale is 0\.5"),
        (lambda w: w.add_bool("llama.attention.causal", False), "attention.causal is False"),
        (lambda w: w.add_clamp_kqv(8.0), "attention.clamp_kqv is 8"),
        (lambda w: w.add_final_logit_softcapping(30.0), "final_logit_softcapping is 30"),
        (lambda w: w.add_uint32("llama.nextn_predict_layers", 1), "nextn_predict_layers is 1"),
        (lambda w: w.add_array("llama.rope.dimension_sections", [8, 4, 4]), r"rope\.dimension_sections is \(8, 4, 4\)"),
        (lambda w: w.add_sliding_window(16), "last 16 tokens alone"),
        (lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(2, np.float32)), "attn_sinks"),
        (lambda w: w.add_token_list(["a", "b", "a"]), "the token 'a' twice"),
    ],
)
def test_models_that_are_not_read(
    tiny: Path, tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(rewritten(tiny, change, tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.add_head_count_kv([2, 2]),
        lambda w: w.add_feed_forward_length([128, 128]),
        lambda w: w.add_logit_scale(1.0),
        lambda w: w.add_bool("llama.attention.causal", True),
        lambda w: w.add_sliding_window(1 << 20),
        lambda w: w.add_array("llama.rope.dimension_sections", [0, 0]),
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
        lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.NONE), w.add_rope_scaling_factor(4.0)),
    ],
)
def test_what_says_the_same_in_other_words(
    tiny: Path, tmp_path: Path, change: Callable[[gguf.GGUFWriter], None]
) -> None:
    config = opened(tiny).config
    assert opened(rewritten(tiny, change, tmp_path)).config == config


@pytest.mark.parametrize(
    ("change", "scaling"),
    [
        (lambda w: w.add_float32("llama.rope.scale_linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
        (lambda w: w.add_rope_scaling_factor(2.0), {"rope_type": "linear", "factor": 2.0}),
        (
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
                w.add_rope_scaling_factor(4.0),
                w.add_context_length(512),
                w.add_float32("llama.rope.scaling.attn_factor", 0.5),
                w.add_rope_scaling_yarn_attn_factor(1.5),
                w.add_rope_scaling_yarn_beta_fast(16.0),
            ),
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 16.0,
                "attention_factor": 0.75 * (0.1 * math.log(4) + 1),
            },
        ),
    ],
)
def test_positions_are_scaled_as_llama_cpp_scales_them(
    tiny: Path, tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], scaling: dict[str, Any]
) -> None:
    assert opened(rewritten(tiny, change, tmp_path)).config["rope_scaling"] == scaling
