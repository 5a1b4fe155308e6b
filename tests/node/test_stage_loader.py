"""A load reads what is not held yet, proves it, and leaves nothing behind where it fails or is called off."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from core.errors import CheckpointError, ConfigError, StageError
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.node.layer_keeper import KV_SHARE, LayerKeeper
from core.node.stage_loader import LoadAborted, Loaded, StageLoader
from core.plugins import PluginHost
from core.protocol.fields import Holding, Shard, Span
from core.runtime.compiled import CompiledStack
from core.runtime.model import Model, Precision
from core.testing.checkpoints import tiny_checkpoint
from core.testing.lone_node import shard_of
from core.testing.published import publish

CPU = torch.device("cpu")
LAYERS = range(1, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=4)


def flip(model: Path, name: str) -> None:
    """Changes one bit of a tensor's first byte."""
    with Model.open(Source(str(model)), PluginHost.installed()) as opened:
        info = opened.checkpoint.tensors[name]
    with (model / info.file).open("r+b") as file:
        file.seek(info.offset)
        byte = file.read(1)[0]
        file.seek(info.offset)
        file.write(bytes([byte ^ 1]))


def edit(file: Path) -> None:
    file.write_text(f"{file.read_text()} ")


def rename_in_header(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"format":"pt"', b'"format":"tf"', 1))


def shard(path: Path, layers: range = LAYERS, **changes: Any) -> Shard:
    return shard_of(path, layers, **changes)


def keeper(max_memory: int | None = None) -> LayerKeeper:
    return LayerKeeper(CPU, max_memory, compiled=False)


def loader(asked: Shard, held: LayerKeeper) -> StageLoader:
    return StageLoader(asked, PluginHost.installed(), CPU, None, held, lambda *_: None)


def load(asked: Shard, held: LayerKeeper) -> Loaded:
    return loader(asked, held).load(DType.FP32)


def test_what_is_asked_for_is_held_as_large_as_the_coordinator_says(model: Path) -> None:
    held, asked = keeper(), shard(model)
    loaded = load(asked, held)
    assert loaded.stage is not None
    assert loaded.weight_bytes == loaded.stage.nbytes == held.nbytes == asked.weight_bytes
    assert list(held.held.spans().values()) == [[LAYERS]]


def test_a_load_called_off_after_its_last_tensor_is_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = keeper()
    late = loader(shard(model), held)
    load_stage = Model.load_stage

    def then_abort(*args: Any) -> Any:
        loaded = load_stage(*args)
        late.abort()
        return loaded

    monkeypatch.setattr(Model, "load_stage", then_abort)
    with pytest.raises(LoadAborted):
        late.load(DType.FP32)
    assert held.nbytes == 0


def test_layers_are_compiled_before_they_are_said_to_be_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[tuple[str, int, int]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    asked, plugins = shard(model), PluginHost.installed()
    compiling = StageLoader(asked, plugins, CPU, None, keeper(), lambda *told: phases.append(told), compiles=True)
    loaded = compiling.load(DType.FP32)
    assert loaded.stage is not None
    assert isinstance(loaded.stage.stack, CompiledStack)
    assert phases[-1] == ("compile", asked.weight_bytes, asked.weight_bytes)


def test_nothing_is_brought_here_to_be_compiled_where_no_compiler_works(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("g++ is not there")

    monkeypatch.setattr(torch, "compile", lambda *_, **options: fail)
    monkeypatch.setattr(Model, "fetch_stage", fail)
    compiling = StageLoader(shard(model), PluginHost.installed(), CPU, None, keeper(), lambda *_: None, compiles=True)
    with pytest.raises(ConfigError, match="--compile can't be had: g\\+\\+ is not there"):
        compiling.load(DType.FP32)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"weight_bytes": 1}, "bytes, not 1"),
        ({"architecture": "other"}, "it is llama, not other"),
        ({"layer_start": 3, "layer_end": 5, "parity_layer": None}, "it has 4 layers"),
    ],
    ids=str,
)
def test_another_model_than_the_coordinators_is_refused(model: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        load(shard(model, **changes), keeper())


def test_layers_are_held_for_the_same_manifest_alone(model: Path) -> None:
    held, asked = keeper(), shard(model)
    first, second = load(asked, held), load(asked, held)
    assert second.stage is not first.stage
    assert (second.read_bytes, second.parity) == (0, first.parity)
    assert held.nbytes == asked.weight_bytes
    other = msgspec.structs.replace(asked.proof, manifest=bytes(32))
    assert load(shard(model, proof=other), held).read_bytes == first.read_bytes > 0
    assert held.nbytes == 2 * asked.weight_bytes


def test_of_an_overlapping_range_only_what_is_not_held_is_read(model: Path) -> None:
    held, whole = keeper(), shard(model, range(4))
    with Model.open(Source(str(model)), PluginHost.installed()) as opened:
        tensors = opened.checkpoint.tensors
        sizes = [sum(tensors[name].nbytes for name in opened.layer_tensor_names([layer])) for layer in range(4)]
    assert load(shard(model, range(1, 3)), held).read_bytes == sizes[1] + sizes[2]
    assert load(shard(model, range(2, 4)), held).read_bytes == sizes[3]
    assert load(whole, held).read_bytes == sizes[0]
    assert load(whole, held).read_bytes == 0
    assert held.nbytes == whole.weight_bytes


def test_held_layers_that_were_proven_to_be_others_are_refused(model: Path) -> None:
    held, asked = keeper(), shard(model)
    load(asked, held)
    other = msgspec.structs.replace(asked.proof, layers=[asked.proof.layers[0], bytes(32)])
    with pytest.raises(CheckpointError, match="layer 2, which it holds in memory, has other bytes"):
        load(shard(model, proof=other), held)


def test_what_surrounds_held_layers_is_proven_again(model: Path, tmp_path: Path) -> None:
    copy, held = tmp_path / "copy", keeper()
    shutil.copytree(model, copy)
    asked = shard(copy)
    load(asked, held)
    edit(copy / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json has other bytes"):
        load(asked, held)


def test_layers_that_no_hop_uses_make_room_those_that_are_named_last(model: Path) -> None:
    one = shard(model, range(1)).weight_bytes
    held = keeper(max_memory=2 * one)
    for layer in (0, 1):
        load(shard(model, range(layer, layer + 1)), held)
    variant = loader(shard(model), held).variant
    held.name(variant, range(1))
    load(shard(model, range(2, 3)), held)
    assert held.held.spans() == {variant: [range(1), range(2, 3)]}
    held.use(7, variant, range(2, 3))
    load(shard(model, range(3, 4)), held)
    assert held.held.spans() == {variant: [range(2, 4)]}
    held.use(8, variant, range(3, 4))
    with pytest.raises(StageError, match=rf"{one} bytes of layers do not fit beside the {2 * one} that are in use"):
        load(shard(model, range(1)), held)
    held.release(7)
    load(shard(model, range(1)), held)
    assert held.held.spans() == {variant: [range(1), range(3, 4)]}


def test_what_is_kept_stays_and_what_is_used(model: Path) -> None:
    held = keeper()
    load(shard(model, range(4)), held)
    variant = loader(shard(model), held).variant
    held.use(1, variant, range(1))
    assert held.keep([Holding(variant.manifest, "fp16", "fp32", [Span(2, 100_000)])])
    assert held.holdings() == [Holding(variant.manifest, "fp16", "fp32", [Span(0, 1), Span(2, 4)])]
    assert not held.keep([Holding(variant.manifest, "fp16", "fp32", [Span(2, 4)])])
    held.release(1)
    assert held.keep([])
    assert (held.holdings(), held.nbytes) == ([], 0)


def test_room_for_caches_is_what_held_layers_leave(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.node.layer_keeper.free_memory", lambda _: 10**9)
    held, unbounded = keeper(max_memory=10**7), keeper()
    load(shard(model), held)
    assert held.kv_room(cached=10) == 10**7 - held.nbytes
    assert unbounded.kv_room(cached=10**9) == int(2 * 10**9 * KV_SHARE)
    assert keeper(max_memory=10**9).kv_room(cached=0) == int(10**9 * KV_SHARE)


def test_layers_that_are_let_go_of_are_gone_at_once(model: Path) -> None:
    held = keeper()
    load(shard(model), held)
    [part, *_] = [part for part in held.held.parts(loader(shard(model), held).variant, LAYERS).values()]
    value = weakref.ref(part.value)
    del part, _
    gc.disable()
    try:
        held.keep([])
    finally:
        gc.enable()
    assert value() is None


def test_to_stand_by_on_disk_takes_no_memory_and_proves_the_files(model: Path, tmp_path: Path) -> None:
    asked, held, copy = shard(model), keeper(), tmp_path / "copy"
    loaded = loader(asked, held).fetch()
    assert (loaded.weight_bytes, loaded.read_bytes, held.nbytes) == (0, 0, 0)
    shutil.copytree(model, copy)
    flip(copy, "model.layers.2.mlp.down_proj.weight")
    with pytest.raises(CheckpointError, match="layer 2, in model"):
        loader(msgspec.structs.replace(asked, model_id=str(copy)), held).fetch()


def test_to_stand_by_in_memory_holds_what_a_stage_is_built_of(model: Path) -> None:
    asked, held = shard(model), keeper()
    loaded = loader(asked, held).hold()
    assert loaded.stage is None
    assert (loaded.weight_bytes, held.nbytes) == (asked.weight_bytes, asked.weight_bytes)
    assert load(asked, held).read_bytes == 0


def test_what_the_node_does_not_have_of_the_model_it_need_not_prove(model: Path, tmp_path: Path) -> None:
    asked = shard(model)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "tokenizer.json").unlink()
    assert load(msgspec.structs.replace(asked, model_id=str(copy)), keeper()).read_bytes > 0


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda copy: flip(copy, "model.layers.2.mlp.down_proj.weight"), r"layer 2, in model\.safetensors, has other"),
        (lambda copy: edit(copy / "tokenizer.json"), r"tokenizer\.json has other bytes"),
        (lambda copy: edit(copy / "config.json"), r"config\.json has other bytes"),
        (lambda copy: edit(copy / "chat_template.jinja"), r"chat_template\.jinja has other bytes"),
        (rename_in_header, r"model\.safetensors says other things"),
    ],
    ids=["a tensor", "tokenizer", "config", "chat template", "header"],
)
def test_a_copy_that_differs_is_refused_and_the_file_is_named(
    model: Path, tmp_path: Path, damage: Callable[[Path], None], complaint: str
) -> None:
    asked = shard(model)
    copy, held = tmp_path / "copy", keeper()
    shutil.copytree(model, copy)
    damage(copy)
    with pytest.raises(CheckpointError, match=complaint) as refusal:
        load(msgspec.structs.replace(asked, model_id=str(copy)), held)
    assert "is not the coordinator's model" in refusal.value.title
    assert held.nbytes == 0


def test_a_difference_in_layers_that_it_does_not_hold_is_not_the_nodes_to_find(model: Path, tmp_path: Path) -> None:
    asked = shard(model)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    flip(copy, "model.layers.3.mlp.down_proj.weight")
    assert load(msgspec.structs.replace(asked, model_id=str(copy)), keeper()).read_bytes > 0


@pytest.mark.parametrize("kind", ["awq", "nvfp4"])
def test_layers_that_are_kept_as_they_were_published_are_proven_and_as_large_as_said(tmp_path: Path, kind: str) -> None:
    published = tiny_checkpoint(tmp_path, layers=4)
    publish(published, kind)
    plugins = PluginHost.installed()
    with Model.open(Source(str(published)), plugins) as model:
        precision = Precision(plugins.quantizers.get("stored"), DType.FP32, DType.FP32)
        nbytes = sum(model.layer_bytes(layer, precision) for layer in LAYERS)
    held, asked = keeper(), shard(published, quant="stored", weight_bytes=nbytes)
    assert load(asked, held).weight_bytes == held.nbytes == asked.weight_bytes
    flip(published, "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match="layer 2"):
        load(asked, keeper())
