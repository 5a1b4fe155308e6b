"""A load that is called off leaves nothing behind, however late the call comes."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import torch
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import CheckpointError, ConfigError
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.node.stage_loader import Holdings, LoadAborted, StageLoader
from core.plugins import PluginHost
from core.protocol.messages import Assignment, Proof, Release
from core.runtime.compiled import CompiledStack
from core.runtime.manifest import Manifest
from core.runtime.model import Model, Precision
from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster_in_memory import memory_cluster

SECONDS = 60
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


def assignment(path: Path, **changes: Any) -> Assignment:
    plugins = PluginHost.installed()
    precision = Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)
    with Model.open(Source(str(path)), plugins) as model:
        proof = Manifest.of(model).proof(LAYERS)
        fields = {
            "epoch": 1,
            "model_id": str(path),
            "revision": None,
            "architecture": model.architecture.name,
            "quant": "fp16",
            "compute_dtype": "fp32",
            "wire_dtype": "fp32",
            "layer_start": LAYERS.start,
            "layer_end_exclusive": LAYERS.stop,
            "is_last": False,
            "total_weight_bytes": sum(model.layer_bytes(layer, precision) for layer in LAYERS),
            "proof": Proof(proof.manifest, dict(proof.files), dict(proof.rests), list(proof.layers)),
            "parity_layer": LAYERS.start,
            "link_token": bytes(16),
        }
    return Assignment(**{**fields, **changes})


def loader(asked: Assignment) -> StageLoader:
    return StageLoader(asked, PluginHost.installed(), torch.device("cpu"), None, lambda *_: None)


def test_what_is_asked_for_is_held_as_large_as_the_coordinator_says(model: Path) -> None:
    holdings, asked = Holdings(), assignment(model)
    loaded = loader(asked).load(holdings)
    assert holdings.stage is loaded.stage
    assert loaded.stage.nbytes == asked.total_weight_bytes


def test_a_load_called_off_after_its_last_tensor_is_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holdings, late = Holdings(), loader(assignment(model))
    load_stage = Model.load_stage

    def then_abort(*args: Any) -> Any:
        loaded = load_stage(*args)
        late.abort()
        return loaded

    monkeypatch.setattr(Model, "load_stage", then_abort)
    with pytest.raises(LoadAborted):
        late.load(holdings)
    assert holdings.stage is None


def test_layers_are_compiled_before_they_are_said_to_be_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[tuple[str, int, int]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    asked, cpu = assignment(model), torch.device("cpu")
    compiling = StageLoader(asked, PluginHost.installed(), cpu, None, lambda *told: phases.append(told), compiles=True)
    assert isinstance(compiling.load(Holdings()).stage.stack, CompiledStack)
    assert phases[-1] == ("compile", asked.total_weight_bytes, asked.total_weight_bytes)


def test_nothing_is_brought_here_to_be_compiled_where_no_compiler_works(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("g++ is not there")

    monkeypatch.setattr(torch, "compile", lambda *_, **options: fail)
    monkeypatch.setattr(Model, "fetch_stage", fail)
    asked, holdings, cpu = assignment(model), Holdings(), torch.device("cpu")
    with pytest.raises(ConfigError, match="--compile can't be had: g\\+\\+ is not there"):
        StageLoader(asked, PluginHost.installed(), cpu, None, lambda *_: None, compiles=True).load(holdings)
    assert holdings.stage is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"total_weight_bytes": 1}, "bytes, not 1"),
        ({"architecture": "other"}, "it is llama, not other"),
        ({"layer_start": 3, "layer_end_exclusive": 5, "parity_layer": None}, "it has 4 layers"),
    ],
    ids=str,
)
def test_another_model_than_the_coordinators_is_refused(model: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        loader(assignment(model, **changes)).load(Holdings())


def test_weights_are_kept_for_the_same_manifest_alone(model: Path) -> None:
    holdings, asked = Holdings(), assignment(model)
    first = loader(asked).load(holdings)
    kept = loader(asked).load(holdings)
    assert (kept.stage, kept.read_bytes) == (first.stage, 0)
    other = msgspec.structs.replace(asked.proof, manifest=bytes(32))
    again = loader(assignment(model, proof=other)).load(holdings)
    assert again.stage is not first.stage
    assert again.read_bytes == first.read_bytes > 0


def test_weights_that_are_dropped_are_gone_at_once(model: Path) -> None:
    holdings = Holdings()
    loader(assignment(model)).load(holdings)
    assert holdings.stage is not None
    stage = weakref.ref(holdings.stage)
    holdings.stage.__dict__["itself"] = holdings.stage  # as torch's modules do by their hooks
    gc.disable()
    try:
        holdings.drop()
    finally:
        gc.enable()
    assert stage() is None


async def test_nodes_that_pause_hold_no_weights_any_more(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    still_held: list[bool] = []
    drop = Holdings.drop

    def noted(self: Holdings) -> None:
        stage = weakref.ref(self.stage) if self.stage is not None else None
        drop(self)
        if stage is not None:
            still_held.append(stage() is not None)

    monkeypatch.setattr(Holdings, "drop", noted)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            for duty in cluster.duties.values():
                duty.pause("its owner plays")
            await cluster.until(lambda _: len(still_held) == 2)
    assert still_held == [False, False]


def test_what_the_node_does_not_have_of_the_model_it_need_not_prove(model: Path, tmp_path: Path) -> None:
    asked = assignment(model)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "tokenizer.json").unlink()
    assert loader(msgspec.structs.replace(asked, model_id=str(copy))).load(Holdings()).read_bytes > 0


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
    asked = assignment(model)
    copy, holdings = tmp_path / "copy", Holdings()
    shutil.copytree(model, copy)
    damage(copy)
    with pytest.raises(CheckpointError, match=complaint) as refusal:
        loader(msgspec.structs.replace(asked, model_id=str(copy))).load(holdings)
    assert "is not the coordinator's model" in refusal.value.title
    assert holdings.stage is None


def test_a_difference_in_layers_that_it_does_not_hold_is_not_the_nodes_to_find(model: Path, tmp_path: Path) -> None:
    asked = assignment(model)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    flip(copy, "model.layers.3.mlp.down_proj.weight")
    assert loader(msgspec.structs.replace(asked, model_id=str(copy))).load(Holdings()).read_bytes > 0


async def test_a_node_that_is_released_while_it_loads_keeps_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Holdings] = []
    read, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    load, load_stage = StageLoader.load, Model.load_stage

    def noted(self: StageLoader, holdings: Holdings) -> Any:
        held.append(holdings)
        try:
            return load(self, holdings)
        finally:
            ended.set()

    def held_up(*args: Any) -> Any:
        loaded = load_stage(*args)
        read.set()
        assert go_on.wait(SECONDS)
        return loaded

    monkeypatch.setattr(StageLoader, "load", noted)
    monkeypatch.setattr(Model, "load_stage", held_up)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.until(lambda _: read.is_set())
            live = cluster.coordinator._live
            assert live is not None
            [member] = live._members.all()
            await member.link.send(Release(1))
            await wait_all_tasks_blocked(0.05)
            go_on.set()
            await cluster.until(lambda _: ended.is_set())
            sent = cluster.machines["a"].sent
            await cluster.until(lambda _: [msgpack.unpackb(frame)["type"] for frame in sent].count("NODE_STATE") == 2)
            assert [holdings.stage for holdings in held] == [None]
