"""What members say of themselves is taken for no more than it can be: names, layers that they hold, and how often."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from core.coordinator.members import Member
from core.errors import ChannelClosed
from core.link import Link, first_message
from core.protocol.fields import Holding, Span
from core.protocol.messages import PROTOCOL_VERSION, Error, ErrorCode, Hello, Message, NodeState, Pause
from core.testing.cluster_in_memory import memory_cluster

SECONDS = 300
TOKENS = 24
MOST = 2**40
"""Room for whatever there is."""


async def test_nobody_takes_the_coordinators_place_in_a_plan(model: Path) -> None:
    """It is called "" at the end of a wire: a node of that name would be no way away from it."""
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            async with cluster.dial() as link:
                await link.send(Hello(PROTOCOL_VERSION, "", free_memory=MOST))
                refusal = await first_message(link)
            assert isinstance(refusal, Error) and refusal.code == ErrorCode.NOT_A_NODE
            assert [node.node_id for node in cluster.coordinator.status().nodes] == ["a"]


def member_called(node_id: str) -> Member:
    return Member(Hello(PROTOCOL_VERSION, node_id), cast(Link, None))


async def test_what_a_member_claims_to_hold_is_looked_at_once_a_layer(model: Path, inside: Any) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            held_as = inside(cluster).supervisor.planning.held_as
            everything = Holding(held_as.manifest, held_as.quant, held_as.dtype, [Span(0, 100_000)] * 128)
            async with cluster.join("liar", free_memory=MOST, max_memory_bytes=MOST) as liar:
                await liar.send(NodeState(0, 0, 0, 0, 2**62, [everything] * 16))
                member = inside(cluster).members.all()[1]
                await cluster.until(lambda _: member.reported.holdings != [])
                assert inside(cluster).supervisor.planning.held(member) == frozenset(range(6))


@pytest.mark.parametrize("news", [lambda n: NodeState(0, 0, 0, 0, n), lambda n: Pause(str(n))], ids=["state", "pause"])
async def test_who_tells_of_itself_without_end_is_cut_off(
    model: Path, prompt: tuple[int, ...], oracle: str, news: Callable[[int], Message]
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            async with cluster.join("liar") as liar, trio.open_nursery() as nursery:
                nursery.start_soon(tell_without_end, liar, news)
                await cluster.until(lambda status: len(status.nodes) == 1)
                assert await cluster.text(prompt, TOKENS) == oracle


async def tell_without_end(link: Link, news: Callable[[int], Message]) -> None:
    with suppress(ChannelClosed):
        for number in itertools.count():
            await link.send(news(number))


async def test_layers_are_held_as_the_spans_say_in_whatever_order(model: Path) -> None:
    member = member_called("a")
    wanted = Holding(b"m", "fp16", "fp32", [Span(0, 10)])
    others = Holding(b"m", "int4", "fp32", [Span(0, 9)])
    spans = [Span(5, 7), Span(0, 2), Span(1, 2), Span(6, 6), Span(9, 99)]
    member.reported = NodeState(0, 0, 0, 0, 0, [others, Holding(b"m", "fp16", "fp32", spans)])
    assert member.holds(wanted) == {0, 1, 5, 6, 9}
    assert member.holds_others(wanted)
