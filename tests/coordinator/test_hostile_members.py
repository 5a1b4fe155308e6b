"""Members that lie of what they hold, load or compute: each costs the cluster its own part, and is left out then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import trio
from trio.testing import MockClock

from core.coordinator.members import FAILED_SECONDS
from core.coordinator.supervisor import RETRY_SECONDS
from core.errors import RouteError, StageError
from core.interfaces.engine import GenerationRequest
from core.interfaces.transport import Channel
from core.link import Link
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    Hello,
    LoadFailed,
)
from core.runtime.stage import Stage
from core.testing.cluster_in_memory import Machine, MemoryCluster, memory_cluster, pass_time
from core.testing.transport import MemoryTransport

PROOF_SECONDS = 0.025
SECONDS = 300
TOKENS = 24
HALF, MOST = 2**20, 2**40
"""Room for three layers of six; and for whatever there is."""
Said = dict[str, Any]


class LyingMachine(Machine):
    """Its node is an honest one, whose messages leave the machine as `lie` makes them."""

    def __init__(self, network: MemoryTransport, lie: Callable[[Said], Said]) -> None:
        super().__init__(network)
        self._lie = lie

    def _noted(self, channel: Channel) -> Any:
        noted = super()._noted(channel)
        send = noted.send

        async def lie(data: bytes) -> None:
            await send(msgpack.packb(self._lie(msgpack.unpackb(data))))

        vars(noted)["send"] = lie
        return noted


class FromNowOn:
    """An honest one, until it `lies`."""

    def __init__(self, lie: Callable[[Said], Said]) -> None:
        self.lies = False
        self._lie = lie

    def __call__(self, said: Said) -> Said:
        return self._lie(said) if self.lies else said


def no_number(said: Said) -> Said:
    if said["type"] == "HIDDEN_STATE":
        *shape, data = said["payload"]["hidden"]
        said["payload"]["hidden"] = [*shape, b"\xff" * len(data)]
    return said


def another_shape(said: Said) -> Said:
    if said["type"] == "HIDDEN_STATE":
        said["payload"]["hidden"] = ["fp32", 7, 1, bytes(28)]
    return said


def another_type(said: Said) -> Said:
    if said["type"] == "HIDDEN_STATE":
        _, rows, width, data = said["payload"]["hidden"]
        said["payload"]["hidden"] = ["fp16", rows, width, data[: len(data) // 2]]
    return said


def refusal(said: Said) -> Said:
    if said["type"] == "HIDDEN_STATE":
        refused = {"hop": said["payload"]["hop"], "message": "not today"}
        return {**said, "type": "INFERENCE_ERROR", "payload": refused}
    return said


def no_room(said: Said) -> Said:
    if said["type"] == "NODE_STATE":
        said["payload"]["kv_room"] = 0
    return said


def full(said: Said) -> Said:
    refused = refusal(said)
    if refused is not said:
        refused["payload"]["no_room"] = True
    return refused


LIES = [no_number, another_shape, another_type, refusal]


def layers_of(cluster: MemoryCluster) -> dict[str, tuple[int, int] | None]:
    return {node.node_id: node.layers for node in cluster.coordinator.status().nodes}


@pytest.mark.parametrize("lie", LIES)
async def test_who_answers_the_proof_with_nonsense_is_left_out_at_once(
    model: Path, prompt: tuple[int, ...], oracle: str, lie: Callable[[Said], Said]
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2, max_nodes=2) as cluster:
            await cluster.start_node("a", max_memory=HALF)
            await cluster.start_node("liar", machine=LyingMachine(cluster.network, lie), max_memory=4 * HALF)
            await cluster.start_node("c", max_memory=HALF)
            await cluster.ready()
            assert layers_of(cluster) == {"a": (0, 3), "liar": None, "c": (3, 6)}
            assert cluster.coordinator.status().nodes[1].state == "failed"
            assert await cluster.text(prompt, TOKENS) == oracle


async def test_who_begins_to_refuse_whatever_it_is_given_is_left_out_soon(
    model: Path, prompt: tuple[int, ...], oracle: str, clock: MockClock
) -> None:
    until_now = FromNowOn(refusal)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2, max_nodes=2) as cluster:
            await cluster.start_node("a", max_memory=HALF)
            await cluster.start_node("liar", machine=LyingMachine(cluster.network, until_now), max_memory=HALF)
            await cluster.ready()
            await cluster.start_node("c", max_memory=HALF)
            assert await cluster.text(prompt, TOKENS) == oracle
            until_now.lies = True
            with pytest.raises(StageError):
                await cluster.text(prompt, TOKENS)
            await pass_time(clock, RETRY_SECONDS + 1)
            await cluster.ready(after_epoch=1)
            assert layers_of(cluster) == {"a": (0, 3), "liar": None, "c": (3, 6)}
            assert await cluster.text(prompt, TOKENS) == oracle


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        *((lie, "answered what can't be, twice in ten minutes") for lie in (no_number, another_shape, another_type)),
        (full, ""),
    ],
)
async def test_who_answers_what_can_not_be_or_has_no_room_is_left_out_and_no_client_notices(
    model: Path, prompt: tuple[int, ...], oracle: str, lie: Callable[[Said], Said], said: str
) -> None:
    """The second time that it answers so; but at once if it lacks the room that it said it has."""
    until_now = FromNowOn(lie)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2, max_nodes=2, rebalance=False) as cluster:
            await cluster.start_node("a", max_memory=HALF)
            await cluster.start_node("liar", machine=LyingMachine(cluster.network, until_now), max_memory=HALF)
            await cluster.ready()
            await cluster.start_node("c", max_memory=HALF)
            until_now.lies = True
            assert await cluster.text(prompt, TOKENS) == oracle
            assert layers_of(cluster) == {"a": (0, 3), "liar": None, "c": (3, 6)}
            assert said in cluster.coordinator.status().nodes[1].detail


async def test_a_single_answer_that_can_not_be_is_forgiven(model: Path, prompt: tuple[int, ...], oracle: str) -> None:
    def once(said: Said) -> Said:
        if until_now.lies and said["type"] == "HIDDEN_STATE":
            until_now.lies = False
            return no_number(said)
        return said

    until_now = FromNowOn(once)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model) as cluster:
            await cluster.start_node("a", machine=LyingMachine(cluster.network, until_now))
            await cluster.ready()
            until_now.lies = True
            assert await cluster.text(prompt, TOKENS) == oracle
            assert (cluster.coordinator.status().route_epoch, until_now.lies) == (1, False)


async def test_a_request_that_every_stage_fails_on_ends_no_route(
    model: Path, prompt: tuple[int, ...], oracle: str, clock: MockClock, monkeypatch: pytest.MonkeyPatch, inside: Any
) -> None:
    run = Stage.run

    def faulty(stage: Stage, hidden: Any, segments: Any, **kwargs: Any) -> Any:
        if any(segment.rows == 7 for segment in segments):
            raise StageError("not finite")
        return run(stage, hidden, segments, **kwargs)

    monkeypatch.setattr(Stage, "run", faulty)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            for _ in range(4):
                with pytest.raises(StageError, match="node 'a' failed"):
                    await cluster.text(prompt[:7], TOKENS)
                await pass_time(clock, RETRY_SECONDS + 1)
                await cluster.until(lambda _: not inside(cluster).route.is_doubted)
            assert await cluster.text(prompt, TOKENS) == oracle
            assert cluster.coordinator.status().route_epoch == 1


async def test_to_come_back_is_not_to_be_chosen_again(model: Path, clock: MockClock) -> None:
    offer = {"free_memory": MOST, "max_memory_bytes": MOST}
    with trio.fail_after(SECONDS + FAILED_SECONDS):
        async with memory_cluster(model) as cluster:
            async with cluster.join("liar", **offer) as liar:
                await liar.send(LoadFailed(await assigned(liar), "not today"))
                await cluster.until(lambda status: status.nodes[0].state == "failed")
            await cluster.until(lambda status: not status.nodes)
            async with cluster.join("liar", **offer) as liar:
                status = await cluster.until(lambda status: len(status.nodes) == 1)
                assert (status.nodes[0].state, status.nodes[0].detail) == ("failed", "not today")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(pass_time, clock, FAILED_SECONDS + RETRY_SECONDS)
                    assert await assigned(liar) == 2
                    nursery.cancel_scope.cancel()


async def assigned(link: Link) -> int:
    """The number of the hop that a member is given next."""
    while not isinstance(message := (await link.receive()).message, Assignment):
        pass
    return message.hop


async def test_who_breaks_the_protocol_is_left_out_when_it_comes_back(model: Path, inside: Any) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            async with cluster.join("liar") as liar:
                await cluster.until(lambda status: len(status.nodes) == 2)
                await liar.send(Hello(PROTOCOL_VERSION, "liar"))
                await cluster.until(lambda status: len(status.nodes) == 1)
            async with cluster.join("liar"):
                status = await cluster.until(lambda status: len(status.nodes) == 2)
                assert "'liar' sent a HELLO" in status.nodes[1].detail


async def test_who_has_no_memory_for_caches_is_left_out(model: Path, prompt: tuple[int, ...], oracle: str) -> None:
    def poor(said: Said) -> Said:
        if said["type"] == "NODE_STATE":
            said["payload"]["kv_room"] = 1000
        return said

    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2, max_nodes=2) as cluster:
            await cluster.start_node("a", max_memory=HALF)
            await cluster.start_node("poor", machine=LyingMachine(cluster.network, poor), max_memory=4 * HALF)
            await cluster.start_node("c", max_memory=HALF)
            status = await cluster.ready()
            assert "has no memory for KV caches: 1000 bytes are left" in status.nodes[1].detail
            assert await cluster.text(prompt, TOKENS) == oracle


@pytest.mark.parametrize("failure", [StageError("the device is gone"), RuntimeError("a kernel is missing")], ids=repr)
async def test_who_can_not_be_compared_does_not_stand_in(
    model: Path, prompt: tuple[int, ...], oracle: str, failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The coordinator itself fails where it computes what the stand-in is to have computed."""

    def failing(*_: Any) -> str:
        raise failure

    caplog.set_level("INFO")
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", standby=True) as cluster:
            await cluster.ready()
            monkeypatch.setattr("core.coordinator.parity_check.ParityCheck.difference", failing)
            await cluster.start_node("b")
            await cluster.until(lambda _: "b does not stand in for layers [0, 6)" in caplog.text)
            assert await cluster.text(prompt, TOKENS) == oracle


async def test_one_whose_memory_is_gone_ends_and_does_not_wait_for_ever(
    model: Path, prompt: tuple[int, ...], inside: Any
) -> None:
    """A node says that it has no room for caches, while it has some: nobody else could free any."""
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, answer_tokens=100) as cluster:
            until_now = FromNowOn(no_room)
            await cluster.start_node("a", machine=LyingMachine(cluster.network, until_now))
            await cluster.ready()
            [member] = inside(cluster).members.all()
            request = GenerationRequest(prompt, temperature=0)
            with pytest.raises(RouteError, match="too little KV memory for this generation"):
                async with cluster.coordinator.generate(request) as generation:
                    async for delta in generation:
                        if delta.tokens > 4:
                            until_now.lies = True
                            member.reported = msgspec.structs.replace(member.reported, kv_room=0)
            await cluster.until(lambda _: not inside(cluster).running and not inside(cluster).waiting)


def spoiled(said: Said) -> Said:
    """What the next hop is handed."""
    if said["type"].startswith("RUN_"):
        *shape, data = said["payload"]["hidden"]
        said["payload"]["hidden"] = [*shape, b"\xff" * len(data)]
    return said


def false_alarm(said: Said) -> Said:
    if said["type"] == "HIDDEN_STATE":
        return {**said, "type": "PEER_LOST", "payload": {"hop": said["payload"]["hop"], "reason": "it is gone"}}
    return said


def silence(said: Said) -> Said:
    return {**said, "request_id": "none"} if said["type"] == "HIDDEN_STATE" else said


@pytest.mark.parametrize("lie", [spoiled, false_alarm, silence])
async def test_who_breaks_one_route_after_another_is_found_out(
    model: Path, prompt: tuple[int, ...], oracle: str, clock: MockClock, lie: Callable[[Said], Said]
) -> None:
    """Of each route that broke any of its nodes may have been at fault, and some blame others for what they did.

    The planner keeps the order of joining: who spoils hidden states does so for the next node.
    """
    options: dict[str, Any] = {"min_nodes": 2, "max_nodes": 2, "rebalance": False, "planner": "balanced"}
    with trio.fail_after(20 * SECONDS):
        async with memory_cluster(model, **options) as cluster:
            names = ["liar", "b", "c"] if lie is spoiled else ["b", "liar", "c"]
            for name in names:
                machine = LyingMachine(cluster.network, lie) if name == "liar" else None
                await cluster.start_node(name, machine=machine, max_memory=HALF)
            while cluster.coordinator.status().state != "ready":
                await pass_time(clock, 1)
                await cluster.until(lambda status: all(node.state != "loading" for node in status.nodes))
                # A second of the clock is no time for the threads that compute a proof: they have this long of ours.
                with trio.move_on_after(PROOF_SECONDS):
                    await cluster.until(lambda status: status.state == "ready")
            assert layers_of(cluster)["liar"] is None
            assert await cluster.text(prompt, TOKENS) == oracle
