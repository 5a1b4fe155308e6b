"""What a plugin does wrong ends a start, a build or a plan, with its name, and neither the host nor a node."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from core import DType, Planner, Quantizer, Source, hookimpl
from core.blocks import Plain
from core.coordinator.coordinator import Coordinator
from core.coordinator.parity_check import ParityCheck
from core.coordinator.settings import CoordinatorSettings
from core.errors import ChannelClosed, PluginError
from core.interfaces.architecture import LayerStack
from core.node.agent import run_node
from core.node.settings import NodeSettings
from core.node.state import Activity
from core.plugins import PluginHost
from core.testing.cluster_in_memory import memory_cluster, pass_time
from core.testing.transport import MemoryTransport

SECONDS = 120


def host_with(**hooks: type) -> PluginHost:
    """All that is installed, and a plugin named "careless" of one class for each hook."""
    host = PluginHost.installed()
    host.register(SimpleNamespace(**{name: hookimpl(lambda cls=cls: [cls]) for name, cls in hooks.items()}), "careless")
    return host


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No traceback is logged."""
    caplog.set_level(logging.INFO)
    yield
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


class Fine(Plain):
    """A node's may be another."""

    name = "careless"


class Fraction(Fine):
    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return shape[0] * shape[1] / 2  # type: ignore[return-value]


class Forgetful(Fine):
    def pack(self, weight: Any, bias: Any, *, dtype: Any, device: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("careless", "said"),
    [(Fraction, r"packed_bytes\(.*gave .*\.0, and it must give a whole number of bytes"), (Forgetful, r"gave None")],
)
async def test_a_host_does_not_start_with_a_quantizer_that_fails(
    model: Path, quiet: None, careless: type[Quantizer], said: str
) -> None:
    with trio.fail_after(SECONDS), pytest.RaisesGroup(pytest.RaisesExc(PluginError, match=said)):
        async with memory_cluster(
            model, min_nodes=1, quant="careless", plugins=host_with(core_quantizers=careless)
        ) as cluster:
            await cluster.ready()


async def test_a_node_whose_plugin_fails_is_left_out_with_its_reason(model: Path, quiet: None) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(
            model, min_nodes=1, quant="careless", plugins=host_with(core_quantizers=Fine)
        ) as cluster:
            await cluster.start_node("bad", plugins=host_with(core_quantizers=Forgetful))
            await cluster.until(lambda status: "careless" in "".join(node.detail for node in status.nodes))
            await cluster.start_node("good", plugins=host_with(core_quantizers=Fine))
            status = await cluster.ready()
            (bad,) = [node for node in status.nodes if node.node_id == "bad"]
            assert "the plugin 'careless' of unpackaged failed: pack(" in bad.detail
            assert bad.layers is None


async def test_layers_that_fail_on_the_host_are_not_planned_for_again_and_again(
    model: Path, clock: MockClock, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    """As an architecture's `build_layers` that gives what does not compute: here only where the host proves itself."""

    def half(stack: LayerStack, hidden: Any, batch: Any) -> Any:
        return hidden[:, :7]

    asked, prepare = [], ParityCheck.prepare

    def noted(check: ParityCheck, layer: int | None) -> Any:
        asked.append(layer)
        with monkeypatch.context() as patch:
            patch.setattr("core.blocks.decoder.DecoderStack.__call__", half)
            return prepare(check, layer)

    monkeypatch.setattr(ParityCheck, "prepare", noted)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            said = "layers of its architecture 'llama', given float32 [24, 64], gave"
            status = await cluster.until(lambda status: said in status.detail)
            assert "gave float32 [24, 7], and not the shape and dtype that they got" in status.detail
            await pass_time(clock, 60)
            assert len(asked) == 1


class Wild(Planner):
    name = "wild"

    def plan(self, request: Any) -> Any:
        return request.nodes


async def test_a_planner_that_fails_is_said_to(model: Path, clock: MockClock, quiet: None) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", planner="wild", plugins=host_with(core_planners=Wild)) as cluster:
            status = await cluster.until(lambda status: "careless" in status.detail)
            assert "the plugin 'careless' of unpackaged failed: plan(" in status.detail
            assert "'wild' raised AttributeError" in status.detail


async def test_a_host_whose_transport_does_not_listen_says_whose_it_is(model: Path, quiet: None) -> None:
    class Deaf(MemoryTransport):
        name = "deaf"

        async def listen(self, *_: Any, **__: Any) -> None:
            raise OSError("no such network")

    settings = CoordinatorSettings(Source(str(model)), "tiny", device="cpu", transport="deaf")
    coordinator = Coordinator(settings, plugins=host_with(core_transports=Deaf))
    with trio.fail_after(SECONDS), pytest.raises(PluginError, match="'deaf' raised OSError: no such network"):
        await coordinator.run()


@pytest.mark.parametrize("method", ["send", "receive"])
async def test_a_channel_that_fails_ends_its_link_alone(model: Path, quiet: None, method: str) -> None:
    """A member's, and the next one joins as ever."""
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1) as cluster:
            async with cluster.dial() as link:

                async def fail(*_: object) -> bytes:
                    raise OSError("the wire has come off")

                setattr(link._channel, method, fail)
                with pytest.raises(ChannelClosed, match=f"MemoryChannel.{method} raised OSError|has ended|was closed"):
                    while True:
                        await link.receive()
            await cluster.start_node("a")
            await cluster.ready()


async def test_a_transport_that_fails_as_it_listens_begins_again(model: Path, quiet: None) -> None:
    failing = trio.Event()

    class Fragile(MemoryTransport):
        name = "fragile"

        async def listen(self, *args: Any, **options: Any) -> None:
            if failing.is_set():
                return await super().listen(*args, **options)
            async with trio.open_nursery() as nursery:
                port = await nursery.start(partial(super().listen, *args, credentials=options["credentials"]))
                options["task_status"].started(port)
                await failing.wait()
                raise OSError("the network is gone")

    plugins = host_with(core_transports=Fragile)
    settings = CoordinatorSettings(Source(str(model)), "tiny", node_port=0, device="cpu", transport="fragile")
    coordinator = Coordinator(settings, plugins=plugins)
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(coordinator.run)
            failing.set()
            await trio.testing.wait_all_tasks_blocked()
            node = NodeSettings("a", cluster_port=coordinator.node_port, device="cpu", threads=1, transport="fragile")
            nursery.start_soon(run_node, node, plugins, Activity())
            seen = coordinator.changes.count
            while coordinator.status().state != "ready":
                await coordinator.changes.wait(seen)
                seen = coordinator.changes.count
            nursery.cancel_scope.cancel()
