"""Checkpoints of safetensors: a directory that is whole, and each way in which one can be damaged."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from core_plugin_safetensors.checkpoint import SafetensorsFormat

from core import Checkpoint, CheckpointError, Source
from core.testing.checkpoints import tiny_checkpoint

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def opened(path: Path) -> Checkpoint:
    return SafetensorsFormat().open(Source(str(path)))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "tiny", layers=2)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "sharded", layers=2, shards=3)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_what_transformers_loads(
    tmp_path: Path, model_type: str, shards: int, dtype: torch.dtype
) -> None:
    path = tiny_checkpoint(tmp_path, model_type=model_type, shards=shards, dtype=dtype, tied=False, layers=2)
    expected = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
    checkpoint = opened(path)
    checkpoint.fetch(expected)
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        info = checkpoint.tensors[name]
        assert (info.shape, info.nbytes) == (tuple(tensor.shape), tensor.nbytes)
        read = checkpoint.read(name)
        assert read.dtype == dtype
        assert torch.equal(read, tensor)
    checkpoint.close()
    checkpoint.close()


def test_slices_are_what_is_read_along_the_first_dimension(tmp_path: Path) -> None:
    checkpoint = opened(tiny_checkpoint(tmp_path, layers=1))
    for name in checkpoint.tensors:
        slices = list(checkpoint.slices(name))
        assert torch.equal(torch.stack(slices), checkpoint.read(name))
        assert slices[0].untyped_storage().nbytes() == slices[0].nbytes


def test_config_and_tokenizer(tiny: Path) -> None:
    checkpoint = opened(tiny)
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config["eos_token_id"] == [2, 0]
    ids = checkpoint.tokenizer().encode("A token enters")
    assert ids == transformers.AutoTokenizer.from_pretrained(tiny).encode("A token enters")


def test_templates_beside_the_default_belong_to_it(tiny: Path) -> None:
    (tiny / "additional_chat_templates").mkdir()
    (tiny / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}", encoding="utf-8")
    checkpoint = opened(tiny)
    assert checkpoint.tokenizer().chat_template["tool_use"] == "{{ tools }}"
    name = "additional_chat_templates/tool_use.jinja"
    assert name in checkpoint.files()
    assert checkpoint.path(name) == tiny / name


def test_opening_reads_no_weights(tiny: Path) -> None:
    """A file whose weights are all holes opens as fast, and says the same, as the whole one."""
    before = opened(tiny).tensors
    file = tiny / WEIGHTS
    size = file.stat().st_size
    with file.open("r+b") as stream:
        header = 8 + int.from_bytes(stream.read(8), "little")
        stream.truncate(header)
        stream.truncate(size)
    assert opened(tiny).tensors == before


def test_recognises_directories_only_by_their_files(tiny: Path, tmp_path: Path) -> None:
    recognises = SafetensorsFormat().recognises
    assert recognises(Source(str(tiny)))
    assert not recognises(Source(str(tiny / WEIGHTS)))
    assert not recognises(Source(str(tmp_path)))


def cut(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-100])


def cut_in_the_header(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:50])


def cut_in_the_length(path: Path) -> None:
    (path / WEIGHTS).write_bytes(b"\x00\x00")


def huge_header(path: Path) -> None:
    (path / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 62) + (path / WEIGHTS).read_bytes()[8:])


def no_json_header(path: Path) -> None:
    (path / WEIGHTS).write_bytes(struct.pack("<Q", 4) + b"oops")


def list_header(path: Path) -> None:
    (path / WEIGHTS).write_bytes(struct.pack("<Q", 2) + b"[]")


def with_header(path: Path, change: Callable[[dict], None]) -> None:
    data = (path / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def lying_shape(path: Path) -> None:
    with_header(path, lambda header: header["model.norm.weight"].update(shape=[65]))


def lying_offsets(path: Path) -> None:
    with_header(path, lambda header: header["model.norm.weight"].update(data_offsets=[0, 1 << 50]))


def offsets_past_the_end(path: Path) -> None:
    with_header(path, lambda header: header["model.norm.weight"].update(data_offsets=[1 << 50, (1 << 50) + 256]))


def senseless_entry(path: Path) -> None:
    with_header(path, lambda header: header["model.norm.weight"].update(shape="wide"))


def endless_shape(path: Path) -> None:
    with_header(path, lambda header: header["model.norm.weight"].update(shape=[math.inf]))


def fractional_offsets(path: Path) -> None:
    with_header(
        path,
        lambda header: header["model.norm.weight"].update(
            data_offsets=[float(at) for at in header["model.norm.weight"]["data_offsets"]]
        ),
    )


def nested_without_end(path: Path) -> None:
    (path / WEIGHTS).write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000)


def entry_without_offsets(path: Path) -> None:
    with_header(path, lambda header: header["model.norm.weight"].pop("data_offsets"))


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        cut_in_the_header,
        cut_in_the_length,
        huge_header,
        no_json_header,
        list_header,
        lying_shape,
        lying_offsets,
        offsets_past_the_end,
        senseless_entry,
        endless_shape,
        fractional_offsets,
        nested_without_end,
        entry_without_offsets,
    ],
)
def test_a_damaged_file_is_named(tiny: Path, damage: Callable[[Path], None]) -> None:
    damage(tiny)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged.*download it again"):
        opened(tiny)


def test_no_config(tiny: Path) -> None:
    (tiny / "config.json").unlink()
    assert SafetensorsFormat().recognises(Source(str(tiny)))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        opened(tiny)


def test_config_that_is_no_json(tiny: Path) -> None:
    (tiny / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        opened(tiny)


def test_pickled_weights_are_not_read(tiny: Path) -> None:
    (tiny / WEIGHTS).rename(tiny / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled.*convert it to safetensors"):
        opened(tiny)


def test_no_weights(tiny: Path) -> None:
    (tiny / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        opened(tiny)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model-00002-of-00003\.safetensors"):
        opened(sharded)


def test_index_that_names_what_no_file_holds(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00003.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors .*model\.extra"):
        opened(sharded)


@pytest.mark.parametrize("weight_map", [None, {"a": 1}, {"a": "../elsewhere.safetensors"}])
def test_index_that_makes_no_sense(sharded: Path, weight_map: object) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        opened(sharded)


def test_a_file_that_shrinks_after_opening(tiny: Path) -> None:
    checkpoint = opened(tiny)
    cut(tiny)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        checkpoint.read("model.norm.weight")


def test_a_file_that_shrinks_after_reading(tiny: Path) -> None:
    checkpoint = opened(tiny)
    tensor = checkpoint.read("model.norm.weight")
    expected = tensor.clone()
    cut(tiny)
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize(
    "name", ["additional_chat_templates/../x.jinja", "../config.json", "/etc/hostname", "notes.txt", ""]
)
def test_only_its_own_files_have_a_path(tiny: Path, name: str) -> None:
    (tiny / "notes.txt").write_text("mine")
    checkpoint = opened(tiny)
    assert checkpoint.path("config.json") == tiny / "config.json"
    assert checkpoint.path(name) is None


def test_tensor_that_is_not_there(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.9"):
        opened(tiny).read("model.layers.9")
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.9"):
        opened(tiny).fetch(["model.layers.9"])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_quantized_weights_are_refused(tiny: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    save_file({"packed": torch.zeros(4, 4).to(dtype)}, tiny / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"packed is stored as .*8.*unquantized"):
        opened(tiny).read("packed")


def test_broken_tokenizer(tiny: Path) -> None:
    (tiny / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer of .* can't be loaded"):
        opened(tiny).tokenizer()
