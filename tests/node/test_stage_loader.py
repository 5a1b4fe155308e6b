"""A load that is called off leaves nothing behind, however late the call comes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import trio
from trio.testing import wait_all_tasks_blocked

from core.errors import CheckpointError
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.node.stage_loader import Holdings, LoadAborted, StageLoader
from core.plugins import PluginHost
from core.protocol.messages import Assignment, Release
from core.runtime.model import Model, Precision
from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster_in_memory import memory_cluster

SECONDS = 60
LAYERS = range(1, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=4)


def assignment(path: Path, **changes: Any) -> Assignment:
    plugins = PluginHost.installed()
    precision = Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)
    with Model.open(Source(str(path)), plugins) as model:
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
            "config": dict(model.spec.config),
            "tensor_count": len(model.layer_tensor_names(LAYERS)),
            "total_weight_bytes": sum(model.layer_bytes(layer, precision) for layer in LAYERS),
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


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tensor_count": 7}, "7 tensors"),
        ({"total_weight_bytes": 1}, "1 bytes"),
        ({"config": {"model_type": "llama"}}, "configs differ in: .*hidden_size"),
        ({"architecture": "other"}, "architecture"),
    ],
    ids=str,
)
def test_another_model_than_the_coordinators_is_refused(model: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        loader(assignment(model, **changes)).load(Holdings())


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
