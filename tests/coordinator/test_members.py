"""Who joins, who is spare, who is left out; and members that say what is not theirs to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import trio
from trio.testing import MockClock

from core import DType, Linear, Quantizer
from core.coordinator.builder import STALL_SECONDS
from core.coordinator.members import FAILED_SECONDS
from core.errors import ChannelClosed, ConfigError
from core.link import Link
from core.node.agent import run_node
from core.node.settings import NodeSettings
from core.node.state import Activity
from core.plugins import PluginHost
from core.protocol.fields import Segment, Tensor
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    ClearCache,
    Error,
    Hello,
    HelloAck,
    HiddenState,
    InferenceError,
    LoadComplete,
    Message,
    PeerConnected,
    PeerLost,
    Ping,
    Release,
    RunDecode,
)
from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster_in_memory import Machine, MemoryCluster, memory_cluster, pass_time, plugins_on

SECONDS = 300
TOKENS = 24
HALF = 2**20
"""Room for three layers of six, and not for more."""


def sent_by(machine: Machine, kind: str) -> list[dict[str, Any]]:
    envelopes = [msgpack.unpackb(frame) for frame in machine.sent]
    return [envelope["payload"] for envelope in envelopes if envelope["type"] == kind]


def layers_of(cluster: MemoryCluster) -> dict[str, tuple[int, int] | None]:
    return {node.node_id: node.layers for node in cluster.coordinator.status().nodes}


async def expect_to_be_cut_off(link: Link, code: str) -> str:
    """The reason that the coordinator gives before it ends the link."""
    answer = (await link.receive()).message
    assert isinstance(answer, Error), answer
    assert answer.code == code
    with pytest.raises(ChannelClosed):
        await link.receive()
    return answer.message


async def test_as_many_nodes_as_are_needed_hold_the_layers_and_the_others_are_spare(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1, max_nodes=2, rebalance=False) as cluster:
            await cluster.start_node("a", max_memory=HALF)
            await cluster.until(lambda status: "does not fit" in status.detail)
            await cluster.start_node("b", max_memory=HALF)
            await cluster.ready()
            await cluster.start_node("c", max_memory=HALF)
            assert layers_of(cluster) == {"a": (0, 3), "b": (3, 6), "c": None}
            assert [node.state for node in cluster.coordinator.status().nodes] == ["ready", "ready", "spare"]
            assert cluster.coordinator.status().required_nodes == 2


@pytest.mark.parametrize("count", [1, 2, 3, 6])
async def test_min_nodes_all_get_layers(model: Path, count: int) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, *"abcdef"[:count]) as cluster:
            await cluster.ready()
            borders = [layers for layers in layers_of(cluster).values() if layers]
            assert len(borders) == count
            assert [start for start, _ in borders] == [0, *(end for _, end in borders[:-1])]
            assert borders[-1][1] == 6


async def test_a_node_that_a_plan_leaves_out_lets_go_of_its_layers(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1) as cluster:
            await cluster.start_node("a", max_memory=HALF)
            await cluster.start_node("b", max_memory=HALF)
            await cluster.ready()
            await cluster.text(prompt, 20)
            await cluster.until(lambda status: status.kv.kept > 0 and status.nodes[0].kv_tokens > len(prompt))
            await cluster.start_node("large")
            await cluster.coordinator.rebalance()
            await cluster.ready(after_epoch=1)
            status = await cluster.until(lambda status: [n.state for n in status.nodes] == ["spare", "spare", "ready"])
            assert layers_of(cluster) == {"a": None, "b": None, "large": (0, 6)}
            assert "spare" in status.left_out["a"]
            await cluster.until(lambda _: len(sent_by(cluster.machine, "RELEASE")) == 2)
            status = await cluster.until(lambda status: status.nodes[0].kv_tokens == 0)
            spare = status.nodes[0]
            assert (spare.weight_bytes, spare.sessions, spare.kv_bytes) == (0, 0, 0)
            await cluster.until(lambda _: len(sent_by(cluster.machine, "KEEP_LAYERS")) == 2)
            cluster.stop_node("large")
            await cluster.ready(after_epoch=2)
            loads = sent_by(cluster.machines["a"], "LOAD_COMPLETE")
            assert [load["read_bytes"] > 0 for load in loads] == [True, True], "it had let go of them"


async def test_a_spare_node_is_spare_no_more_when_nobody_serves(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=1) as cluster:
            for node_id in ("a", "b"):
                await cluster.start_node(node_id, max_memory=HALF)
            await cluster.ready()
            await cluster.start_node("small", max_memory=2**16)
            assert [node.state for node in cluster.coordinator.status().nodes] == ["ready", "ready", "spare"]
            cluster.stop_node("b")
            status = await cluster.until(lambda status: "does not fit" in status.detail)
            assert [(node.node_id, node.state, node.detail) for node in status.nodes][1] == ("small", "idle", "")


async def test_one_id_is_one_node(model: Path, prompt: tuple[int, ...], oracle: str) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            async with cluster.join("twin", free_memory=0) as first:
                await cluster.until(lambda status: len(status.nodes) == 2)
                async with cluster.join("twin", hostname="second"):
                    status = await cluster.until(lambda status: status.nodes[-1].hostname == "second")
                    assert [node.node_id for node in status.nodes] == ["a", "twin"]
                    assert "'twin'" in await expect_to_be_cut_off(first, "replaced")
                    assert await cluster.text(prompt, TOKENS) == oracle
                await cluster.until(lambda status: len(status.nodes) == 1)


async def test_a_node_that_joins_again_takes_its_old_place(model: Path, prompt: tuple[int, ...], oracle: str) -> None:
    """Its old connection seems alive to the coordinator, as after a cut cable."""
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            cluster.machines["b"].unplug()
            cluster.stop_node("b")
            await cluster.start_node("b")
            status = await cluster.ready(after_epoch=1)
            assert [node.node_id for node in status.nodes] == ["a", "b"]
            assert await cluster.text(prompt, TOKENS) == oracle


async def test_of_two_nodes_with_one_id_the_earlier_gives_way_for_good(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model) as cluster:

            async def earlier() -> None:
                settings = node_settings(cluster, "twin")
                with pytest.raises(ConfigError, match=r"took this one's place.*'twin'.*--node-id of its own"):
                    await run_node(settings, plugins_on(Machine(cluster.network)), Activity())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(earlier)
                await cluster.ready()
                await cluster.start_node("twin")
            status = await cluster.ready(after_epoch=1)
            assert [node.node_id for node in status.nodes] == ["twin"]


def node_settings(cluster: MemoryCluster, node_id: str) -> NodeSettings:
    port = cluster.coordinator.node_port
    return NodeSettings(node_id, cluster_port=port, device="cpu", threads=1, transport=Machine.name)


class NoKernels(Quantizer):
    name = "fp16"

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return PluginHost.installed().quantizers.get(self.name).packed_bytes(shape, dtype)

    def pack(self, weight: Any, bias: Any, *, dtype: torch.dtype, device: torch.device) -> Linear:
        raise RuntimeError("no kernel image for this device")


async def test_a_node_that_can_not_load_is_left_out_and_the_others_serve(
    model: Path, prompt: tuple[int, ...], oracle: str, clock: MockClock
) -> None:
    broken = PluginHost.installed()
    broken.quantizers.add("fp16", NoKernels())
    with trio.fail_after(SECONDS + 2 * FAILED_SECONDS):
        async with memory_cluster(model, "a", min_nodes=2, planner="balanced") as cluster:
            await cluster.start_node("bad", plugins=broken)
            status = await cluster.until(lambda status: status.nodes[1].state == "failed")
            assert "no kernel image" in status.nodes[1].detail
            await cluster.until(lambda status: "1 more node must join" in status.detail)
            assert "node 'bad' could not load layers [3, 6)" in cluster.coordinator.status().detail
            assert cluster.coordinator.status().ready_nodes == 1
            await cluster.start_node("c")
            await cluster.ready()
            assert layers_of(cluster) == {"a": (0, 3), "bad": None, "c": (3, 6)}
            status = cluster.coordinator.status()
            assert [node.state for node in status.nodes] == ["ready", "failed", "ready"]
            assert "no kernel image" in status.nodes[1].detail
            assert await cluster.text(prompt, TOKENS) == oracle
            broken.quantizers.add("fp16", PluginHost.installed().quantizers.get("fp16"))
            await pass_time(clock, FAILED_SECONDS + 1)
            cluster.stop_node("c")
            await cluster.ready(after_epoch=2)
            assert layers_of(cluster) == {"a": (0, 3), "bad": (3, 6)}


async def test_a_node_without_the_coordinators_model_says_so(model: Path, tmp_path: Path) -> None:
    """A node opens the checkpoint itself: here its copy has gone."""
    gone = tiny_checkpoint(tmp_path / "gone", layers=6)
    with trio.fail_after(SECONDS):
        async with memory_cluster(gone, min_nodes=1) as cluster:
            await cluster.until(lambda status: "must join" in status.detail)
            (gone / "config.json").unlink()
            await cluster.start_node("a")
            status = await cluster.until(lambda status: status.nodes[0].state == "failed")
            assert "config.json" in status.nodes[0].detail


async def test_another_version_is_refused_with_both_named(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            async with cluster.dial() as link:
                await link.send(Hello(protocol=PROTOCOL_VERSION + 1, node_id="x", core_version="9.9.9"))
                reason = await expect_to_be_cut_off(link, "protocol_version")
            assert f"protocol {PROTOCOL_VERSION} (core " in reason
            assert f"protocol {PROTOCOL_VERSION + 1} (core 9.9.9)" in reason
            assert "install the same version" in reason
            assert list(layers_of(cluster)) == ["a"]


async def test_a_stranger_that_talks_nonsense_is_told_so(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model) as cluster, cluster.dial() as link:
            await link._channel.send(b"\xc1 no message")
            assert "no message" in await expect_to_be_cut_off(link, "protocol")


async def test_a_node_of_another_version_ends_with_the_reason(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.node.connection.PROTOCOL_VERSION", 0)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model) as cluster:
            settings = node_settings(cluster, "old")
            with pytest.raises(ConfigError, match=r"refused this node.*install the same version on both"):
                await run_node(settings, plugins_on(Machine(cluster.network)), Activity())


@pytest.mark.parametrize("first", [Ping(1), HelloAck(1), LoadComplete(1, 1, 1, 1.0), None], ids=repr)
async def test_a_stranger_is_refused(model: Path, clock: MockClock, first: Message | None) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            async with cluster.dial() as link:
                if first is None or isinstance(first, Ping):
                    await pass_time(clock, 6)
                    with pytest.raises(ChannelClosed):
                        await link.receive()
                else:
                    await link.send(first)
                    assert first.TYPE in await expect_to_be_cut_off(link, "not_a_node")
            assert list(layers_of(cluster)) == ["a"]


ROW = Tensor("fp32", 1, 64, bytes(256))
NOT_A_SPARES: list[Message] = [
    HiddenState(1, ROW, []),
    RunDecode(1, [Segment(1, 0, 1, 1)], ROW, []),
    ClearCache(1, [1]),
    PeerLost(1, "x"),
    InferenceError(1, "x"),
]
NOT_A_NODES: list[Message] = [Release(1), Hello(protocol=1, node_id="a"), HelloAck(1)]


@pytest.mark.parametrize("message", NOT_A_SPARES + NOT_A_NODES, ids=lambda message: message.TYPE)
async def test_a_member_that_says_what_is_not_its_to_say_is_cut_off_and_the_others_go_on(
    model: Path, prompt: tuple[int, ...], oracle: str, message: Message
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            async with cluster.join("liar") as liar, cluster.generating(prompt, max_tokens=TOKENS) as session:
                await liar.send(message, "1")
                assert "node 'liar'" in await expect_to_be_cut_off(liar, "protocol")
                assert await session.result() == oracle
            assert list(layers_of(cluster)) == ["a", "b"]
            assert cluster.coordinator.status().route_epoch == 1


async def test_a_member_that_sends_no_protocol_is_cut_off(model: Path, prompt: tuple[int, ...], oracle: str) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            async with cluster.join("liar") as liar:
                await cluster.until(lambda status: len(status.nodes) == 3)
                await liar._channel.send(b"\xc1 no message")
                await expect_to_be_cut_off(liar, "protocol")
            assert await cluster.text(prompt, TOKENS) == oracle


@pytest.mark.parametrize("stale", [HiddenState(0, ROW, []), PeerLost(0, "x"), InferenceError(0, "x")], ids=repr)
async def test_what_belongs_to_an_earlier_route_goes_nowhere(
    model: Path, prompt: tuple[int, ...], oracle: str, stale: Message
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            async with cluster.join("late") as late, cluster.generating(prompt, max_tokens=TOKENS) as session:
                await late.send(stale, "1")
                await late.send(PeerConnected(0, True, ""))
                assert await session.result() == oracle
                assert len(cluster.coordinator.status().nodes) == 3
            assert cluster.coordinator.status().route_epoch == 1


async def test_a_node_ignores_batches_of_an_earlier_route(
    model: Path, prompt: tuple[int, ...], oracle: str, inside: Any
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            for member in inside(cluster).members.all():
                await member.link.send(RunDecode(0, [Segment(1, 7, 1, 1)], ROW, []), "99")
                await member.link.send(ClearCache(0, [1]))
            assert await cluster.text(prompt, TOKENS) == oracle
            for machine in cluster.machines.values():
                assert sent_by(machine, "INFERENCE_ERROR") == []


async def test_what_a_member_says_after_it_left_goes_nowhere(model: Path, inside: Any) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            [member] = inside(cluster).members.all()
            cluster.stop_node("a")
            await cluster.until(lambda status: not status.nodes)
            member.post(LoadComplete(1, 1, 1, 1.0))


async def test_who_leaves_on_purpose_is_gone_at_once(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            async with cluster.join("guest") as guest:
                await cluster.until(lambda status: len(status.nodes) == 2)
                await guest.send(Error("end", "quit"))
                await cluster.until(lambda status: len(status.nodes) == 1)


async def test_a_node_that_says_nothing_while_it_loads_is_left_out(
    model: Path, prompt: tuple[int, ...], oracle: str, clock: MockClock
) -> None:
    offer = {"free_memory": 2**26, "max_memory_bytes": 2**26}
    with trio.fail_after(SECONDS + 2 * STALL_SECONDS):
        async with (
            memory_cluster(model, "a", min_nodes=2, max_nodes=2) as cluster,
            cluster.join("mute", **offer) as mute,
            trio.open_nursery() as nursery,
        ):
            assert isinstance((await mute.receive()).message, Assignment)
            nursery.start_soon(answer_heartbeats_alone, mute)
            await cluster.start_node("c")
            await cluster.until(lambda status: status.nodes[0].state == "loaded")
            await pass_time(clock, STALL_SECONDS + 1)
            status = await cluster.until(lambda status: status.nodes[1].state == "failed")
            assert status.nodes[1].detail == "no answer within 180 s"
            await pass_time(clock, 6)
            await cluster.ready(after_epoch=1)
            assert layers_of(cluster) == {"a": (0, 3), "mute": None, "c": (3, 6)}
            assert await cluster.text(prompt, TOKENS) == oracle
            nursery.cancel_scope.cancel()


async def answer_heartbeats_alone(link: Link) -> None:
    while True:
        await link.receive()
