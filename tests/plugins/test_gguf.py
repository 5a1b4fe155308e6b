"""GGUF files: the same model as the checkpoint that they were converted from, and each way to be damaged."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from core_plugin_gguf import files
from core_plugin_gguf import tokenizer as gguf_tokenizer
from core_plugin_gguf.checkpoint import GgufFormat

from core import Checkpoint, CheckpointError, Source
from core.testing.checkpoints import tiny_checkpoint, write_gguf

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TEXTS = ["A token enters the first layer, don't it?\n", "Zoë, 你好, мир \t 👩‍👩‍👧", "<|im_start|>user\nhi<|im_end|>"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_tokenizer, "user_cache_path", lambda _name: tmp_path / "cache")
    return tmp_path / "cache" / "tokenizers"


def opened(path: Path) -> Checkpoint:
    return GgufFormat().open(Source(str(path)))


def converted(directory: Path, quant: str = "F16", **options: Any) -> tuple[Path, Path]:
    """A tiny checkpoint and the GGUF file made of it."""
    original = tiny_checkpoint(directory / "original", **{"layers": 2, **options})
    return original, write_gguf(original, directory / "tiny.gguf", quant)


def state_of(original: Path, tied: bool) -> dict[str, torch.Tensor]:
    state = transformers.AutoModelForCausalLM.from_pretrained(original).state_dict()
    if tied:
        del state["lm_head.weight"]
    return state


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("quant", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_every_tensor_is_what_transformers_loads(
    tmp_path: Path, model_type: str, tied: bool, quant: str, dtype: torch.dtype
) -> None:
    original, file = converted(tmp_path, quant, model_type=model_type, tied=tied, dtype=dtype)
    expected = state_of(original, tied)
    checkpoint = opened(file)
    checkpoint.fetch(expected)
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        read = checkpoint.read(name)
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        assert read.dtype == (dtype if tensor.ndim > 1 else torch.float32)
        assert torch.equal(read, tensor.to(read.dtype))
    checkpoint.close()
    checkpoint.close()


def test_biases_of_llama_are_unpermuted_too(tmp_path: Path) -> None:
    original, file = converted(tmp_path, attention_bias=True)
    checkpoint = opened(file)
    assert checkpoint.config["attention_bias"]
    for projection in "qkvo":
        name = f"model.layers.1.self_attn.{projection}_proj.bias"
        assert torch.equal(checkpoint.read(name), state_of(original, tied=True)[name])


@pytest.mark.parametrize("quant", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_quantized_tensors_are_what_the_gguf_package_makes_of_them(tmp_path: Path, quant: str) -> None:
    """Quantization is by row, so that a row's place does not change what it becomes."""
    original, file = converted(tmp_path, quant)
    kind = gguf.GGMLQuantizationType[quant]
    checkpoint = opened(file)
    for name, tensor in state_of(original, tied=True).items():
        expected, info = tensor, checkpoint.tensors[name]
        if tensor.ndim > 1:
            packed = gguf.quants.quantize(tensor.numpy(), kind)
            expected = torch.from_numpy(gguf.quants.dequantize(packed, kind))
            assert (info.dtype, info.nbytes) == (quant, packed.nbytes)
        assert torch.equal(checkpoint.read(name), expected)


def test_more_rows_than_are_dequantized_at_once(tmp_path: Path) -> None:
    original, file = converted(tmp_path, "Q8_0", vocab=2500)
    expected = state_of(original, tied=True)["model.embed_tokens.weight"]
    assert torch.allclose(opened(file).read("model.embed_tokens.weight"), expected, atol=0.02)


def test_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    original, file = converted(tmp_path)
    checkpoint = opened(file)
    tensor = checkpoint.read("model.norm.weight")
    checkpoint.close()
    assert torch.equal(tensor, state_of(original, tied=True)["model.norm.weight"])


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("head_dim", "rope_scaling"),
    [
        (None, None),
        (None, {"rope_type": "linear", "factor": 4.0}),
        (32, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
    ],
)
def test_config_is_the_original_one(
    tmp_path: Path, model_type: str, head_dim: int | None, rope_scaling: dict[str, Any] | None
) -> None:
    original, file = converted(
        tmp_path, model_type=model_type, head_dim=head_dim, rope_scaling=rope_scaling, tied=False
    )
    assert same_model(original, file)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize(("head_dim", "context"), [(64, 8192), (128, 8192), (16, 128)])
def test_llama3_scaling_comes_back_from_its_factors(tmp_path: Path, factor: float, head_dim: int, context: int) -> None:
    scaling = {**LLAMA3, "factor": factor, "original_max_position_embeddings": context}
    original, file = converted(tmp_path, head_dim=head_dim, rope_scaling=scaling, layers=1)
    assert opened(file).config["rope_scaling"] == scaling
    assert same_model(original, file)
    assert "rope_freqs.weight" not in opened(file).tensors


def same_model(original: Path, file: Path) -> bool:
    said = transformers.AutoConfig.for_model(**opened(file).config).to_dict()
    meant = transformers.AutoConfig.from_pretrained(original).to_dict()
    for key in ("dtype", "architectures", "_name_or_path"):
        del said[key], meant[key]
    return said == meant


def test_generation_config_ends_at_every_end(tmp_path: Path) -> None:
    _, file = converted(tmp_path)
    assert opened(file).generation_config == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_the_tokenizer_is_the_original_one(tmp_path: Path, model_type: str) -> None:
    original, file = converted(tmp_path, model_type=model_type)
    expected = transformers.AutoTokenizer.from_pretrained(original)
    checkpoint = opened(file)
    for tokenizer in (checkpoint.tokenizer(), checkpoint.tokenizer()):
        assert [tokenizer.encode(text) for text in TEXTS] == [expected.encode(text) for text in TEXTS]
        assert tokenizer.chat_template == expected.chat_template
        assert tokenizer.eos_token_id == expected.eos_token_id


def test_the_tokenizer_is_converted_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = converted(tmp_path)
    ids = opened(file).tokenizer().encode(TEXTS[0])
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(gguf_tokenizer, "_converted", None)
    assert opened(file).tokenizer().encode(TEXTS[0]) == ids


def test_a_damaged_cache_entry_is_made_again(tmp_path: Path, cache: Path) -> None:
    _, file = converted(tmp_path)
    ids = opened(file).tokenizer().encode(TEXTS[0])
    [entry] = cache.iterdir()
    whole = (entry / "tokenizer.json").read_bytes()
    (entry / "tokenizer.json").write_bytes(whole[:100])
    assert opened(file).tokenizer().encode(TEXTS[0]) == ids
    assert (entry / "tokenizer.json").read_bytes() == whole


def test_a_cache_that_can_not_be_written_is_done_without(tmp_path: Path, cache: Path) -> None:
    _, file = converted(tmp_path)
    cache.parent.write_text("no directory")
    assert opened(file).tokenizer().encode("A")


def test_files_beside_it_do_not_change_the_tokenizer(tmp_path: Path) -> None:
    original, file = converted(tmp_path)
    ids = opened(file).tokenizer().encode(TEXTS[2])
    (original / "tokenizer_config.json").write_text("{}")
    assert opened(file.rename(original / file.name)).tokenizer().encode(TEXTS[2]) == ids


def test_recognises_existing_files_by_their_name(tmp_path: Path) -> None:
    _, file = converted(tmp_path)
    recognises = GgufFormat().recognises
    assert recognises(Source(str(file)))
    assert not recognises(Source(str(tmp_path / "other.gguf")))
    assert not recognises(Source(str(tmp_path)))


def cut_in_the_weights(data: bytes) -> bytes:
    return data[:-200]


def cut_in_the_header(data: bytes) -> bytes:
    return data[:1000]


def cut_in_the_counts(data: bytes) -> bytes:
    return data[:10]


def too_many_tensors(data: bytes) -> bytes:
    return data[:8] + struct.pack("<Q", 1 << 60) + data[16:]


def too_many_keys(data: bytes) -> bytes:
    return data[:16] + struct.pack("<Q", 1 << 60) + data[24:]


def endless_key(data: bytes) -> bytes:
    return data[:24] + struct.pack("<Q", 1 << 62) + data[32:]


def endless_array(data: bytes) -> bytes:
    at = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    return data[:at] + struct.pack("<Q", 1 << 61) + data[at + 8 :]


def endless_token(data: bytes) -> bytes:
    at = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 16
    return data[:at] + struct.pack("<Q", (1 << 64) - 1) + data[at + 8 :]


def unknown_value_type(data: bytes) -> bytes:
    at = data.index(b"general.architecture") + len("general.architecture")
    return data[:at] + struct.pack("<I", 99) + data[at + 4 :]


def key_that_is_no_text(data: bytes) -> bytes:
    return data.replace(b"general.architecture", b"general.architectur\xff")


def tensor_past_the_end(data: bytes) -> bytes:
    at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
    return data[:at] + struct.pack("<Q", 1 << 50) + data[at + 8 :]


def row_that_is_no_whole_block(data: bytes) -> bytes:
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4
    return data[:at] + struct.pack("<Q", 63) + data[at + 8 :]


@pytest.mark.parametrize(
    "damage",
    [
        cut_in_the_weights,
        cut_in_the_header,
        cut_in_the_counts,
        too_many_tensors,
        too_many_keys,
        endless_key,
        endless_array,
        endless_token,
        unknown_value_type,
        key_that_is_no_text,
        tensor_past_the_end,
        row_that_is_no_whole_block,
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    _, file = converted(tmp_path, "Q8_0")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is damaged.*download it again"):
        opened(file)


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04" * 100])
def test_what_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is not a GGUF file"):
        opened(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_versions_that_are_not_read(tmp_path: Path, version: int) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(CheckpointError, match=f"is GGUF version {version}"):
        opened(tmp_path / "tiny.gguf")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no .*other\.gguf"):
        opened(tmp_path / "other.gguf")


def test_tensor_types_that_are_not_read(tmp_path: Path) -> None:
    _, file = converted(tmp_path, "Q8_0")
    data = file.read_bytes()
    at = data.index(b"blk.0.attn_v.weight") + len("blk.0.attn_v.weight") + 4 + 16
    file.write_bytes(data[:at] + struct.pack("<I", 250) + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_v\.weight .* unknown type 250"):
        opened(file)
    file.write_bytes(data[:at] + struct.pack("<I", gguf.GGMLQuantizationType.I8) + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.v_proj\.weight is stored as I8"):
        opened(file).read("model.layers.0.self_attn.v_proj.weight")


@pytest.mark.parametrize("quant", ["F16", "Q8_0"])
def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path, quant: str) -> None:
    _, file = converted(tmp_path, quant)
    checkpoint = opened(file)
    tensor = checkpoint.read("model.layers.0.self_attn.v_proj.weight")
    expected = tensor.clone()
    os.truncate(file, 1000)
    assert torch.equal(tensor, expected)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf was cut short"):
        checkpoint.read("model.layers.1.self_attn.v_proj.weight")


def test_tensor_that_is_not_there(tmp_path: Path) -> None:
    _, file = converted(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.9"):
        opened(file).read("model.layers.9")
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.9"):
        opened(file).fetch(["model.layers.9"])


def rewritten(file: Path, change: Callable[[gguf.GGUFWriter], None], architecture: str = "llama") -> Path:
    """`file` with other metadata: each key that `change` adds stands in for the one that was there."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_name("rewritten.gguf"), architecture)
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
    return file.with_name("rewritten.gguf")


def test_a_turn_may_end_in_several_ways(tmp_path: Path) -> None:
    _, file = converted(tmp_path)
    ends = rewritten(file, lambda writer: (writer.add_eot_token_id(7), writer.add_eom_token_id(8)))
    assert opened(ends).generation_config["eos_token_id"] == [2, 7, 8, 0]


def test_the_alignment_is_the_files_own(tmp_path: Path) -> None:
    _, file = converted(tmp_path)
    aligned = rewritten(file, lambda writer: writer.add_custom_alignment(4096))
    for name in opened(file).tensors:
        assert torch.equal(opened(aligned).read(name), opened(file).read(name))


def test_a_head_that_is_longer_than_the_first_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = converted(tmp_path)
    tensors = opened(file).tensors
    monkeypatch.setattr(files, "FIRST_LOOK", 64)
    assert opened(file).tensors == tensors
    monkeypatch.setattr(files, "LARGEST_HEAD", 1024)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is damaged.*over 1024 bytes"):
        opened(file)


def test_rope_factors_that_are_not_llama3s(tmp_path: Path) -> None:
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192, "high_freq_factor": 5.0}
    _, file = converted(tmp_path, head_dim=64, rope_scaling=scaling, layers=1)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not what Llama 3 models have"):
        opened(file)
