"""Generations: as the oracle's, one beside the other, and whatever becomes of one, nothing of it is left."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from core.coordinator.route import STALL_SECONDS
from core.errors import RequestError, RouteError, StageError
from core.interfaces.engine import Conversation, GenerationRequest
from core.interfaces.transport import Channel
from core.protocol.fields import Segment, Tensor
from core.protocol.messages import ClearCache, RunDecode
from core.runtime.stage import Stage
from core.runtime.tokenizer import Tokenizer
from core.testing.cluster_in_memory import Machine, MemoryCluster, memory_cluster, pass_time

SECONDS = 300
TOKENS = 24
NODES = ("a", "b", "c")


class Alone(Machine):
    """A machine that reaches the coordinator and no other node: its neighbours are relayed."""

    def dial(self, host: str, port: int, **options: Any) -> AbstractAsyncContextManager[Channel]:
        return super().dial(host if port == self.coordinator_port else "10.9.9.9", port, **options)

    coordinator_port = 0


@asynccontextmanager
async def ready_cluster(model: Path, links: str = "direct", **settings: Any) -> AsyncIterator[MemoryCluster]:
    """Ended sessions' caches are freed at once, unless the test says otherwise."""
    async with memory_cluster(model, min_nodes=3, **{"prefix_cache": False, **settings}) as cluster:
        for node_id in NODES:
            machine = Alone(cluster.network) if links == "relayed" else Machine(cluster.network)
            if isinstance(machine, Alone):
                machine.coordinator_port = cluster.coordinator.node_port
            await cluster.start_node(node_id, machine=machine)
        status = await cluster.ready()
        assert [node.link.partition(" ")[0] for node in status.nodes] == ["", links, links]
        yield cluster


async def nothing_is_left(cluster: MemoryCluster, stages: list[Stage]) -> None:
    """No session in any cache: behind a token that went the same way, so behind all that was sent before it."""
    await cluster.text((5,), 1)
    await cluster.until(lambda status: status.sessions == 0 and not any(len(stage.caches) for stage in stages))
    await cluster.until(
        lambda status: all((node.sessions, node.kv_tokens, node.kv_bytes) == (0, 0, 0) for node in status.nodes)
    )


def traffic(machine: Machine) -> list[tuple[str, int]]:
    """What a machine sent for sessions, in order: kind, session."""
    found = []
    for frame in machine.sent:
        envelope = msgpack.unpackb(frame)
        payload = envelope["payload"]
        if envelope["type"].startswith("RUN_"):
            found.append(("RUN", payload["segments"][0][0]))
        elif envelope["type"] == "CLEAR_CACHE":
            found.append(("CLEAR", payload["sessions"][0]))
    return found


links = pytest.mark.parametrize("links", ["direct", "relayed"])


@links
async def test_text_is_the_oracles_also_for_many_at_once(
    model: Path, prompt: tuple[int, ...], oracle: str, links: str, stages: list[Stage]
) -> None:
    texts: list[str] = []

    async def generate(cluster: MemoryCluster) -> None:
        texts.append(await cluster.text(prompt, TOKENS))

    with trio.fail_after(SECONDS):
        async with ready_cluster(model, links) as cluster:
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(generate, cluster)
            assert texts == [oracle] * 8
            await nothing_is_left(cluster, stages)


async def test_prefill_in_chunks_gives_the_same_text(model: Path, prompt: tuple[int, ...], oracle: str) -> None:
    with trio.fail_after(SECONDS):
        async with ready_cluster(model, max_chunk=7) as cluster:
            assert await cluster.text(prompt, TOKENS) == oracle


@links
async def test_who_leaves_early_leaves_nothing(
    model: Path, prompt: tuple[int, ...], links: str, inside: Any, stages: list[Stage]
) -> None:
    with trio.fail_after(SECONDS):
        async with ready_cluster(model, links) as cluster:
            request = GenerationRequest(prompt, max_tokens=400, temperature=0)
            async with cluster.coordinator.generate(request) as generation:
                async for delta in generation:
                    if delta.tokens == 3:
                        break
                await cluster.until(lambda status: all(node.sessions == 1 for node in status.nodes))
            await nothing_is_left(cluster, stages)
            assert inside(cluster).route.in_flight == 0


async def test_who_never_begins_leaves_nothing(model: Path, prompt: tuple[int, ...], stages: list[Stage]) -> None:
    with trio.fail_after(SECONDS):
        async with ready_cluster(model) as cluster:
            async with cluster.coordinator.generate(GenerationRequest(prompt, max_tokens=5)) as generation:
                assert generation.prompt_tokens == len(prompt)
                assert cluster.coordinator.status().sessions == 1
            await nothing_is_left(cluster, stages)


@links
@pytest.mark.parametrize("when", ["in the first prefill chunk", "in a later one", "in a decode step"])
async def test_who_is_cancelled_while_a_stage_computes_leaves_nothing(
    model: Path,
    prompt: tuple[int, ...],
    oracle: str,
    links: str,
    when: str,
    gate: Any,
    inside: Any,
    stages: list[Stage],
) -> None:
    """The CLEAR_CACHE that frees a session must not overtake the batch that is under way, or that begins it anew."""
    batches = {"in the first prefill chunk": 0, "in a later one": 1, "in a decode step": 5}[when]
    with trio.fail_after(SECONDS):
        async with ready_cluster(model, links, max_chunk=7) as cluster:
            gate.close_after(3 * batches)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cluster.text, prompt, 400)
                    await cluster.until(lambda _: gate.waiting)
                    scope.cancel()
            assert inside(cluster).route.in_flight >= 1
            assert cluster.coordinator.status().sessions == 0
            await wait_all_tasks_blocked()
            gate.open()
            await nothing_is_left(cluster, stages)
            assert inside(cluster).route.in_flight == 0
            for machine in (cluster.machines["a"], cluster.machines["b"]):
                sent = [kind for kind, session in traffic(machine) if session == 1]
                assert sent.index("CLEAR") == len(sent) - 1 >= batches + 1
            assert await cluster.text(prompt, TOKENS) == oracle


@links
async def test_many_that_come_and_go_leave_nothing(
    model: Path, prompt: tuple[int, ...], oracle: str, links: str, inside: Any, stages: list[Stage]
) -> None:
    chance = random.Random(11)

    async def come_and_go(cluster: MemoryCluster, patience: float) -> None:
        await trio.sleep(chance.random() * 0.1)
        with trio.move_on_after(patience):
            await cluster.text(prompt, 60)

    with trio.fail_after(SECONDS):
        async with ready_cluster(model, links) as cluster:
            async with trio.open_nursery() as nursery:
                for _ in range(30):
                    nursery.start_soon(come_and_go, cluster, chance.random() * 0.2)
            await nothing_is_left(cluster, stages)
            assert inside(cluster).route.in_flight == 0
            assert await cluster.text(prompt, TOKENS) == oracle


async def test_a_session_that_lost_its_cache_begins_anew(
    model: Path, prompt: tuple[int, ...], oracle: str, inside: Any, stages: list[Stage]
) -> None:
    with trio.fail_after(SECONDS):
        async with ready_cluster(model) as cluster:
            async with (
                cluster.generating(prompt, max_tokens=TOKENS) as unlucky,
                cluster.generating(prompt, max_tokens=TOKENS) as lucky,
            ):
                route = inside(cluster).route
                await route.command(ClearCache(route.hops[0].number, [1]))
                assert await unlucky.result() == oracle
                assert await lucky.result() == oracle
            assert cluster.coordinator.status().route_epoch == 1
            await nothing_is_left(cluster, stages)


@pytest.mark.parametrize(
    "failure", [RuntimeError("out of memory"), StageError("not finite"), MemoryError(), SystemExit(3)], ids=repr
)
async def test_whatever_a_stage_raises_fails_one_session_and_the_route_stands(
    model: Path,
    prompt: tuple[int, ...],
    oracle: str,
    failure: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    stages: list[Stage],
) -> None:
    run = Stage.run

    def faulty(stage: Stage, hidden: torch.Tensor, segments: Any, **kwargs: Any) -> torch.Tensor:
        if segments[0].session == 1 and stage.layers.start == 2:
            raise failure
        return run(stage, hidden, segments, **kwargs)

    monkeypatch.setattr(Stage, "run", faulty)
    with trio.fail_after(SECONDS):
        async with ready_cluster(model) as cluster:
            with pytest.raises(StageError, match=r"node 'b' failed on layers \[2, 4\)") as caught:
                await cluster.text(prompt, TOKENS)
            assert str(failure) in str(caught.value)
            assert await cluster.text(prompt, TOKENS) == oracle
            assert cluster.coordinator.status().route_epoch == 1
            await nothing_is_left(cluster, stages)


@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(2, 64, "fp32"), (1, 63, "fp32"), (1, 64, "int8"), (0, 64, "fp32")], ids=str
)
async def test_a_batch_that_contradicts_itself_fails_alone(
    model: Path, prompt: tuple[int, ...], oracle: str, inside: Any, rows: int, width: int, dtype: str
) -> None:
    data = bytes(rows * width * 4) if dtype == "fp32" else b""
    tensor = Tensor(dtype, rows if dtype == "fp32" else 0, width, data)
    with trio.fail_after(SECONDS):
        async with ready_cluster(model) as cluster:
            route = inside(cluster).route
            with pytest.raises(StageError, match="node 'a' failed"):
                await route.run(RunDecode(route.hops[0].number, [Segment(9, 0, 1, 1)], tensor))
            assert await cluster.text(prompt, TOKENS) == oracle


async def test_clients_that_come_and_go_fill_no_queue(
    model: Path, prompt: tuple[int, ...], oracle: str, gate: Any, inside: Any, stages: list[Stage]
) -> None:
    """While a stage is busy, what ended sessions have sent still waits for it, and no more is sent behind it."""

    async def come_and_go(cluster: MemoryCluster) -> None:
        with trio.move_on_after(0.01):
            await cluster.text(prompt, 5)

    with trio.fail_after(SECONDS):
        async with ready_cluster(model) as cluster:
            gate.close_after(0)
            for _ in range(30):
                async with trio.open_nursery() as nursery:
                    for _ in range(20):
                        nursery.start_soon(come_and_go, cluster)
            assert 1 <= inside(cluster).route.in_flight <= len(NODES)
            gate.open()
            await cluster.until(lambda _: inside(cluster).route.in_flight == 0)
            await nothing_is_left(cluster, stages)
            assert await cluster.text(prompt, TOKENS) == oracle
            assert cluster.coordinator.status().route_epoch == 1


@pytest.mark.parametrize(
    ("request_", "complaint", "code"),
    [
        (GenerationRequest(()), "the prompt is empty", None),
        (GenerationRequest(""), "the prompt is empty", None),
        (GenerationRequest((5, 320)), "the model has no token 320", None),
        (GenerationRequest((5, -1)), "the model has no token -1", None),
        (GenerationRequest((5,) * 500, max_tokens=13), "context length is 512", "context_length_exceeded"),
        (GenerationRequest((5,) * 512), "context length is 512", "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_can_not_be_had_is_refused_on_admission(
    model: Path, request_: GenerationRequest, complaint: str, code: str | None
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            with pytest.raises(RequestError, match=complaint) as refusal:
                async with cluster.coordinator.generate(request_):
                    pass
            assert refusal.value.code == code
            assert cluster.coordinator.status().sessions == 0


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [([], "the prompt is empty"), ([5, 320], "the model has no token 320")],
    ids=["empty", "outside"],
)
async def test_a_conversation_is_checked_like_any_prompt(
    model: Path, monkeypatch: pytest.MonkeyPatch, ids: list[int], complaint: str
) -> None:
    """What a chat template renders, and a tokenizer with more ids than the model makes of it, can be anything."""
    monkeypatch.setattr(Tokenizer, "encode_chat", lambda *_: ids)
    request = GenerationRequest(Conversation(({"role": "user", "content": "hello"},)))
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            with pytest.raises(RequestError, match=complaint) as refusal:
                async with cluster.coordinator.generate(request):
                    pass
            assert refusal.value.param == "prompt"


async def test_a_context_can_be_filled_to_its_end(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            request = GenerationRequest(tuple(range(40, 240)) * 2 + (7,) * 90, temperature=0)
            async with cluster.coordinator.generate(request) as generation:
                deltas = [delta async for delta in generation]
            assert (deltas[-1].tokens, deltas[-1].finish_reason) == (22, "length")


async def test_a_session_whose_route_breaks_goes_on_with_the_next(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with ready_cluster(model) as cluster:
            whole = await cluster.text(prompt, 120)
            request = GenerationRequest(prompt, max_tokens=120, temperature=0)
            async with cluster.coordinator.generate(request) as generation:
                deltas = aiter(generation)
                text = (await anext(deltas)).text
                cluster.network.sever(cluster.machines["a"].port)
                await cluster.ready(after_epoch=1)
                text += "".join([delta.text async for delta in deltas])
            assert text == whole


async def test_a_batch_that_nobody_answers_ends_the_route(
    model: Path, prompt: tuple[int, ...], oracle: str, gate: Any, clock: MockClock
) -> None:
    with trio.fail_after(SECONDS + 2 * STALL_SECONDS):
        async with ready_cluster(model, recovery_time=0) as cluster:
            gate.close_after(3)
            async with cluster.generating(prompt, max_tokens=400) as session:
                await cluster.until(lambda _: gate.waiting)
                await pass_time(clock, STALL_SECONDS + 1)
                with pytest.raises(RouteError, match=r"no answer.*120 s"):
                    await session.result()
            gate.open()
            await cluster.ready(after_epoch=1)
            assert await cluster.text(prompt, TOKENS) == oracle
