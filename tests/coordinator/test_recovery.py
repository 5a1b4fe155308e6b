"""Routes that break under generations: each goes on where it was, on the next route, and is told once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from trio.testing import MockClock

from core.coordinator.router import MAX_LOST_ROUTES
from core.errors import NotReady, RouteError
from core.interfaces.engine import Delta, GenerationRequest, Grammar
from core.runtime.stage import Stage
from core.testing.cluster_in_memory import Machine, MemoryCluster, memory_cluster, pass_time

SECONDS = 300
TOKENS = 24
PLACES = {"first": "a", "middle": "b", "last": "c"}


class Told:
    """What a generation told its reader, whose `at` is called after so many tokens."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def counts(self) -> list[int]:
        return [delta.tokens for delta in self.deltas]

    async def read(
        self, cluster: MemoryCluster, request: GenerationRequest, at: dict[int, Callable[[], None]] | None = None
    ) -> Told:
        waiting = dict(at or {})
        async with cluster.coordinator.generate(request) as generation:
            async for delta in generation:
                self.deltas.append(delta)
                for tokens in [tokens for tokens in waiting if delta.tokens >= tokens]:
                    waiting.pop(tokens)()
            self.cached_tokens, self.prompt_logprobs = generation.cached_tokens, generation.prompt_logprobs
        assert not waiting, "it ended before"
        return self


def greedy(prompt: tuple[int, ...], tokens: int = TOKENS, **more: Any) -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens=tokens, **{"temperature": 0.0, **more})


def sent_by(machine: Machine, kind: str) -> list[dict[str, Any]]:
    envelopes = [msgpack.unpackb(frame) for frame in machine.sent]
    return [envelope["payload"] for envelope in envelopes if envelope["type"] == kind]


async def nothing_is_left(cluster: MemoryCluster, stages: list[Stage], inside: Any) -> None:
    await cluster.text((5,), 1)
    await cluster.until(lambda status: status.sessions == 0 and not any(len(stage.caches) for stage in stages))
    await cluster.until(lambda status: all((node.sessions, node.kv_tokens) == (0, 0) for node in status.nodes))
    assert inside(cluster).service.admission.budget.reserved == 0
    assert inside(cluster).router.queue.sessions == []


@pytest.mark.parametrize("victim", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("at", [1, 9, 23])
async def test_a_text_goes_on_when_any_of_its_machines_dies(
    model: Path, prompt: tuple[int, ...], oracle: str, victim: str, at: int, stages: list[Stage], inside: Any
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", "c", prefix_cache=False) as cluster:
            await cluster.ready()
            await cluster.start_node("spare")
            told = await Told().read(cluster, greedy(prompt), {at: lambda: cluster.stop_node(victim)})
            assert told.text == oracle
            assert told.counts[-1] == TOKENS
            assert told.counts == sorted(set(told.counts)), "no token is counted twice"
            status = await cluster.ready(after_epoch=1)
            assert {node.node_id for node in status.nodes if node.layers} == {"a", "b", "c", "spare"} - {victim}
            await nothing_is_left(cluster, stages, inside)


async def test_a_text_waits_for_the_machine_that_comes_back(
    model: Path, prompt: tuple[int, ...], oracle: str, inside: Any
) -> None:
    phases = []
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            async with trio.open_nursery() as nursery:
                told = Told()
                nursery.start_soon(told.read, cluster, greedy(prompt), {5: lambda: cluster.stop_node("b")})
                status = await cluster.until(lambda status: status.state == "waiting")
                assert "node 'b' was lost with layers [3, 6)" in status.detail
                phases = [generation.phase for generation in status.generations]
                (session,) = inside(cluster).router.sessions
                assert "node 'b' was lost" in session.waits_for
                await cluster.start_node("b")
            assert session.waits_for == ""
            assert phases == ["suspended"]
            assert told.text == oracle
            metrics = {
                metric.name: metric.samples[0].value for metric in cluster.coordinator.metrics() if metric.samples
            }
            assert metrics["core_recoveries"] == 1
            assert metrics["core_recovery_seconds"] > 0


REQUESTS = {
    "sampled": {"temperature": 1.0, "seed": 7},
    "penalised": {"frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "log probabilities": {"logprobs": 2},
    "grammar": {"grammar": Grammar("lark", "start: /[a-z ]{40,}/"), "temperature": 1.0, "seed": 3},
    "stop": {"stop": ("Em",)},
    "unbounded": {"max_tokens": None},
}


@pytest.mark.parametrize("case", REQUESTS.values(), ids=REQUESTS)
async def test_whatever_shapes_a_generation_survives(
    model: Path, prompt: tuple[int, ...], case: dict[str, Any]
) -> None:
    request = replace(greedy(prompt, 60), **case)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            await cluster.start_node("c")
            undisturbed = await Told().read(cluster, request)
            at = max(1, undisturbed.counts[-1] // 2)
            told = await Told().read(cluster, request, {at: lambda: cluster.stop_node("b")})
            assert told.text == undisturbed.text
            assert told.deltas[-1].finish_reason == undisturbed.deltas[-1].finish_reason
            assert told.counts[-1] == undisturbed.counts[-1]
            tokens = [[one.token for delta in each.deltas for one in delta.logprobs] for each in (told, undisturbed)]
            assert tokens[0] == tokens[1]
            assert (await cluster.ready()).route_epoch == 2


async def test_a_prompt_that_is_read_for_its_log_probabilities_is_read_again(
    model: Path, prompt: tuple[int, ...], gate: Any
) -> None:
    request = greedy(prompt, 3, prompt_logprobs=0)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", max_chunk=7) as cluster:
            await cluster.ready()
            await cluster.start_node("c")
            undisturbed = await Told().read(cluster, request)
            gate.close_after(3)
            async with trio.open_nursery() as nursery:
                told = Told()
                nursery.start_soon(told.read, cluster, request)
                await cluster.until(lambda _: gate.waiting)
                cluster.stop_node("b")
                gate.open()
            assert [one.token for one in told.prompt_logprobs] == list(prompt)
            assert told.text == undisturbed.text


async def test_what_the_first_prefill_found_is_what_a_generation_tells(
    model: Path, prompt: tuple[int, ...], oracle: str
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            await cluster.start_node("c")
            await cluster.text(prompt, TOKENS)
            told = await Told().read(cluster, greedy(prompt), {5: lambda: cluster.stop_node("a")})
            assert (told.text, told.cached_tokens) == (oracle, len(prompt) - 1)


async def test_all_that_run_and_wait_go_on_in_their_order(
    model: Path, prompt: tuple[int, ...], oracle: str, gate: Any, stages: list[Stage], inside: Any
) -> None:
    done: list[int] = []
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", max_sessions=2, prefix_cache=False) as cluster:
            await cluster.ready()
            await cluster.start_node("c")

            async def read(number: int) -> None:
                assert (await Told().read(cluster, greedy(prompt))).text == oracle
                done.append(number)

            gate.close_after(9)
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(read, number)
                    await cluster.until(lambda status, n=number: len(status.generations) == n + 1)
                cluster.stop_node("b")
                gate.open()
            assert sorted(done[:2]) == [0, 1]
            assert sorted(done[2:4]) == [2, 3]
            await nothing_is_left(cluster, stages, inside)


async def test_two_losses_in_a_row_are_survived(model: Path, prompt: tuple[int, ...], oracle: str) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            for spare in ("c", "d"):
                await cluster.start_node(spare)
            at = {4: lambda: cluster.stop_node("a"), 12: lambda: cluster.stop_node("b")}
            assert (await Told().read(cluster, greedy(prompt), at)).text == oracle


async def test_a_request_under_which_routes_break_again_and_again_is_given_up(
    model: Path, prompt: tuple[int, ...], oracle: str
) -> None:
    victims = ["a", "b", "c", "d", "e"]
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", min_nodes=1) as cluster:
            await cluster.ready()
            for spare in victims[1:]:
                await cluster.start_node(spare)

            def kill() -> None:
                [serving] = [node.node_id for node in cluster.coordinator.status().nodes if node.layers]
                cluster.stop_node(serving)

            told = Told()
            with pytest.raises(RouteError, match=f"{MAX_LOST_ROUTES} routes have broken under this request"):
                await told.read(cluster, greedy(prompt, 400), {at: kill for at in (5, 30, 60, 90)})
            assert told.text.startswith(oracle)
            await cluster.ready(after_epoch=3)
            assert await cluster.text(prompt, TOKENS) == oracle, "others are served"


async def test_when_the_recovery_time_is_up_the_error_names_who_was_lost(
    model: Path, prompt: tuple[int, ...], oracle: str, clock: MockClock
) -> None:
    with trio.fail_after(SECONDS + 30):
        async with memory_cluster(model, "a", "b", recovery_time=20) as cluster:
            await cluster.ready()
            async with cluster.generating(prompt, max_tokens=400) as running:
                cluster.stop_node("b")
                await cluster.until(lambda status: status.state == "waiting")
                await pass_time(clock, 19)
                assert not running.ended.is_set()
                await pass_time(clock, 2)
                with pytest.raises(RouteError, match=r"node 'b' was lost with layers \[3, 6\)"):
                    await running.result()


async def test_requests_wait_while_a_route_is_made_and_are_refused_if_none_can_be(
    model: Path, prompt: tuple[int, ...], oracle: str, loading: Any
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            cluster.stop_node("b")
            await cluster.until(lambda status: status.state == "waiting" and "1 more node must join" in status.detail)
            with pytest.raises(NotReady, match="1 more node must join"):
                await cluster.text(prompt, 1)
            loading.hold()
            await cluster.start_node("c")
            await cluster.until(lambda status: status.state == "loading")
            async with trio.open_nursery() as nursery:
                told = Told()
                nursery.start_soon(told.read, cluster, greedy(prompt))
                status = await cluster.until(lambda status: len(status.generations) == 1)
                assert status.generations[0].phase == "waiting"
                loading.go_on()
            assert told.text == oracle


async def test_after_a_loss_only_the_layers_that_are_missing_are_read(
    model: Path, prompt: tuple[int, ...], oracle: str
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", "c") as cluster:
            await cluster.ready()
            await cluster.start_node("d")
            [whole] = {
                load["read_bytes"] for name in "abc" for load in sent_by(cluster.machines[name], "LOAD_COMPLETE")
            }
            assert (await Told().read(cluster, greedy(prompt), {5: lambda: cluster.stop_node("b")})).text == oracle
            loads = {name: sent_by(cluster.machines[name], "LOAD_COMPLETE")[-1]["read_bytes"] for name in "acd"}
            assert sum(loads.values()) == whole
