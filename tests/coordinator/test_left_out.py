"""Members that fail are left out of plans: how soon, for how long, and what is remembered of them."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import trio
from trio.testing import MockClock

from core.coordinator.builder import STALL_SECONDS
from core.coordinator.members import FAILED_SECONDS, MAX_FAILED_SECONDS, Member, Members
from core.link import Link
from core.protocol.messages import PROTOCOL_VERSION, Assignment, Hello, LoadProgress
from core.testing.cluster_in_memory import memory_cluster, pass_time

SECONDS = 300


async def test_a_node_that_is_always_nearly_done_is_left_out(model: Path, clock: MockClock) -> None:
    offer = {"free_memory": 2**26, "max_memory_bytes": 2**26}
    with trio.fail_after(SECONDS + 4 * STALL_SECONDS):
        async with (
            memory_cluster(model) as cluster,
            cluster.join("slow", **offer) as slow,
            trio.open_nursery() as nursery,
        ):
            hop = await assigned(slow)
            nursery.start_soon(read_on, slow)
            for seconds in (STALL_SECONDS / 2, STALL_SECONDS / 2, 10):
                await slow.send(LoadProgress(hop, "load", 9, 10))
                await pass_time(clock, seconds)
            status = await cluster.until(lambda status: status.nodes[0].state == "failed")
            assert status.nodes[0].detail.startswith("it was not done after 18")
            nursery.cancel_scope.cancel()


async def assigned(link: Link) -> int:
    """The number of the hop that a member is given next."""
    while not isinstance(message := (await link.receive()).message, Assignment):
        pass
    return message.hop


def member_called(node_id: str) -> Member:
    return Member(Hello(PROTOCOL_VERSION, node_id), cast(Link, None))


async def read_on(link: Link) -> None:
    """And so answer heartbeats."""
    while True:
        await link.receive()


async def test_failures_are_remembered_for_a_while_and_of_so_many_nodes(autojump_clock: MockClock) -> None:
    members = Members()
    for number in range(1000):
        member = member_called(str(number))
        members.add(member)
        member.fail("not today")
        members.remove(member, "it left")
    for node_id, failed in (("999", True), ("0", False)):
        again = member_called(node_id)
        members.add(again)
        assert again.failed_lately == failed
        members.remove(again, "it left")
    await trio.sleep(FAILED_SECONDS)
    again = member_called("999")
    members.add(again)
    assert not again.failed_lately


async def test_failures_in_a_row_keep_a_node_out_for_longer_each_time(autojump_clock: MockClock) -> None:
    member, seconds = member_called("a"), []
    for _ in range(7):
        member.fail("not today")
        member.fail("the same trouble, said by another")
        assert member.failure is not None
        seconds.append(member.failure.seconds)
        await trio.sleep(seconds[-1])
        assert not member.failed_lately
    assert seconds == [30, 60, 120, 240, 480, 600, 600]
    await trio.sleep(MAX_FAILED_SECONDS)
    member.fail("after a good while")
    assert member.failure.seconds == FAILED_SECONDS
