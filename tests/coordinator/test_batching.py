"""Sessions that run together: in shared batches, within a budget, from each other's caches, and each as if alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from core.coordinator.session import READ_AHEAD
from core.errors import Overloaded, StageError
from core.interfaces.engine import Delta, GenerationRequest, Grammar
from core.runtime.grammar import Matcher
from core.runtime.stage import Stage
from core.testing.cluster_in_memory import MemoryCluster, memory_cluster, pass_time

SECONDS = 300
TOKENS = 24
STAGE_BYTES = 443_904
"""Of three of the tiny model's six layers."""
KV_BYTES = 768
"""Of one token in three layers."""
LONG = tuple(range(40, 240))


def sent(cluster: MemoryCluster, kind: str) -> list[dict[str, Any]]:
    """The payloads of what the coordinator sent of a kind, in order."""
    envelopes = [msgpack.unpackb(frame) for frame in cluster.machine.sent]
    return [envelope["payload"] for envelope in envelopes if envelope["type"] == kind]


async def texts(cluster: MemoryCluster, *requests: GenerationRequest) -> list[str]:
    """All at once, in the order of the requests."""
    found = [""] * len(requests)

    async def generate(index: int, request: GenerationRequest) -> None:
        async with cluster.coordinator.generate(request) as generation:
            found[index] = "".join([delta.text async for delta in generation])

    async with trio.open_nursery() as nursery:
        for index, request in enumerate(requests):
            nursery.start_soon(generate, index, request)
    return found


def greedy(prompt: tuple[int, ...], max_tokens: int | None = TOKENS, client: str = "") -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens=max_tokens, temperature=0, client=client)


async def test_sessions_share_batches_and_stages_work_at_once(model: Path, prompt: tuple[int, ...]) -> None:
    most = 0
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", speculation=False) as cluster:
            await cluster.ready()
            prompts = [tuple(token + shift for token in prompt) for shift in range(8)]
            alone = [await cluster.text(each, TOKENS) for each in prompts]
            cluster.machine.sent.clear()
            assert await texts(cluster, *map(greedy, prompts)) == alone
            for run in sent(cluster, "RUN_DECODE"):
                most = max(most, len(run["segments"]))
                assert len({segment[0] for segment in run["segments"]}) == len(run["segments"])
            assert most == 4, "half of the sessions for each of two stages"


async def test_a_prompt_in_chunks_lets_decode_steps_pass(model: Path, prompt: tuple[int, ...]) -> None:
    options = {"min_chunk": 2, "max_chunk": 10, "speculation": False, "prefix_cache": False}
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", **options) as cluster:
            await cluster.ready()
            expected = await cluster.text(LONG, 4)
            cluster.machine.sent.clear()
            async with cluster.generating(prompt, max_tokens=400) as talker:
                assert await cluster.text(LONG, 4) == expected
                assert not talker.ended.is_set()
            runs = sorted(
                (frame for frame in map(msgpack.unpackb, cluster.machine.sent) if frame["type"].startswith("RUN_")),
                key=lambda frame: int(frame["seq"]),
            )
            kinds = [{segment[0] for segment in frame["payload"]["segments"]} for frame in runs]
            chunks = [index for index, sessions in enumerate(kinds) if 3 in sessions]
            between = [index for index in range(chunks[0], chunks[-1]) if 2 in kinds[index]]
            assert len(chunks) >= len(LONG) // 10
            assert len(between) >= 5


async def test_whoever_does_not_fit_waits_its_turn(model: Path, prompt: tuple[int, ...], inside: Any) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", max_sessions=2) as cluster:
            await cluster.ready()
            order: list[str] = []
            waiting: list[str] = []
            within = inside(cluster)

            async def one(name: str, client: str) -> None:
                async with cluster.coordinator.generate(greedy(prompt, 30, client)) as generation:
                    order.append(name)
                    async for _ in generation:
                        pass

            async with (
                trio.open_nursery() as nursery,
                cluster.coordinator.generate(greedy(prompt, 200, "greedy")),
                cluster.coordinator.generate(greedy(prompt, 200, "greedy")),
            ):
                for name, client in (("second", "greedy"), ("third", "greedy"), ("first", "modest")):
                    nursery.start_soon(one, name, client)
                    waiting.append(name)
                    await cluster.until(lambda _: len(within.waiting) == len(waiting))
                assert order == []
            assert sorted(order) == ["first", "second", "third"]
            assert order.index("first") < order.index("third"), "the clients in turn"


async def test_too_many_that_wait_and_too_long_a_wait_are_refused(
    model: Path, prompt: tuple[int, ...], clock: Any, inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("router", "waiting_queue"):
        monkeypatch.setattr(f"core.coordinator.{module}.MAX_WAITING", 1)
    refusals: list[str] = []

    async def wait(cluster: MemoryCluster) -> None:
        with pytest.raises(Overloaded) as refusal:
            await cluster.text(prompt, 1)
        refusals.append(str(refusal.value))

    with trio.fail_after(SECONDS + 200):
        async with memory_cluster(model, "a", max_sessions=1) as cluster:
            await cluster.ready()
            async with cluster.coordinator.generate(greedy(prompt, 200)), trio.open_nursery() as nursery:
                within = inside(cluster)
                nursery.start_soon(wait, cluster)
                await cluster.until(lambda _: len(within.waiting) == 1)
                await wait(cluster)
                await cluster.until(lambda _: all(session.is_ahead for session in within.running.values()))
                await pass_time(clock, 121)
            assert "1 requests are waiting" in refusals[0]
            assert "no room within 120 s: beside 1 running and 0 waiting" in refusals[1]
            ended = next(metric for metric in cluster.coordinator.metrics() if metric.name == "core_requests_ended")
            assert {sample.labels[0][1]: sample.value for sample in ended.samples} == {
                "cancelled": 1,
                "queue_full": 1,
                "queue_timeout": 1,
            }


async def test_answers_without_a_bound_make_room_for_who_came_first(
    model: Path, prompt: tuple[int, ...], stages: list[Stage]
) -> None:
    """Three that each grow to the whole context, two blocks, in memory for three blocks: later ones begin anew."""
    prompts = [tuple(token + shift for token in prompt) for shift in range(3)]
    options = {"min_nodes": 2, "max_context": 300, "answer_tokens": 100, "speculation": False}
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, **options) as cluster:
            for node_id in ("a", "b"):
                await cluster.start_node(node_id, max_memory=STAGE_BYTES + 768 * KV_BYTES)
            await cluster.ready()
            alone = [(await texts(cluster, greedy(each, None)))[0] for each in prompts]
            cluster.machine.sent.clear()
            assert await texts(cluster, *(greedy(each, None) for each in prompts)) == alone
            segments = [segment for run in sent(cluster, "RUN_PREFILL") for segment in run["segments"]]
            prefills = Counter(session for session, _, rows, *_ in segments if rows > 1)
            assert max(prefills.values()) > 1, "one at least was begun anew"
            for stage in stages:
                assert stage.caches.nbytes <= 768 * KV_BYTES


async def test_more_than_all_memory_holds_is_refused_with_what_there_is(model: Path) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2, max_context=300) as cluster:
            for node_id in ("a", "b"):
                await cluster.start_node(node_id)
            await cluster.ready()
            assert cluster.coordinator.card().context_length == 300
            with pytest.raises(Exception, match="maximum context length is 300 tokens"):
                await cluster.text(LONG, 101)
            assert await cluster.text(LONG, 100)


async def test_a_chat_that_goes_on_is_not_prefilled_again(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            first = await generation_of(cluster, greedy(LONG, 8))
            assert first.cached_tokens == 0
            again = await generation_of(cluster, greedy(LONG, 8))
            assert (again.text, again.cached_tokens) == (first.text, len(LONG) - 1)
            cluster.machine.sent.clear()
            longer = await generation_of(cluster, greedy((*LONG, *prompt), 8))
            assert longer.cached_tokens == len(LONG)
            [run] = sent(cluster, "RUN_PREFILL")
            assert run["segments"][0][1:3] == [len(LONG), len(prompt)]
        async with memory_cluster(model, "a", "b", prefix_cache=False) as cluster:
            await cluster.ready()
            fresh = await generation_of(cluster, greedy((*LONG, *prompt), 8))
            assert (fresh.text, fresh.cached_tokens) == (longer.text, 0)


@pytest.mark.parametrize("shared", [False, True])
async def test_nobody_learns_from_caches_what_another_client_asked(model: Path, shared: bool) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", share_prefixes=shared) as cluster:
            await cluster.ready()
            for client, cached in (("anna", 0), ("bert", len(LONG) - 1 if shared else 0), ("anna", len(LONG) - 1)):
                assert (await generation_of(cluster, greedy(LONG, 4, client))).cached_tokens == cached


async def test_many_that_begin_alike_copy_what_one_has_prefilled(model: Path, prompt: tuple[int, ...]) -> None:
    prompts = [(*LONG[:100], *(token + shift for token in prompt)) for shift in range(3)]
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", prefix_cache=False) as cluster:
            await cluster.ready()
            alone = [(await texts(cluster, greedy(each)))[0] for each in prompts]
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            await cluster.text(LONG, 4)
            assert await texts(cluster, *map(greedy, prompts)) == alone
            copies = sent(cluster, "COPY_CACHE")
            assert [copy["length"] for copy in copies] == [100] * 3
            assert (await generation_of(cluster, greedy(LONG, 4))).cached_tokens == len(LONG) - 1


async def test_kept_caches_make_room_for_sessions(model: Path, prompt: tuple[int, ...], stages: list[Stage]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, min_nodes=2) as cluster:
            for node_id in ("a", "b"):
                await cluster.start_node(node_id, max_memory=STAGE_BYTES + 768 * KV_BYTES)
            await cluster.ready()
            for shift in range(12):
                await cluster.text(tuple(token + shift for token in prompt), 8)
                assert all(stage.caches.nbytes <= 768 * KV_BYTES for stage in stages)
            await cluster.text(LONG + LONG, 100)
            assert all(len(stage.caches) <= 3 for stage in stages)


class Generated:
    def __init__(self, text: str, cached_tokens: int) -> None:
        self.text = text
        self.cached_tokens = cached_tokens


async def generation_of(cluster: MemoryCluster, request: GenerationRequest) -> Generated:
    async with cluster.coordinator.generate(request) as generation:
        text = "".join([delta.text async for delta in generation])
        return Generated(text, generation.cached_tokens)


class Foresight:
    """A Drafter that knows what comes, but for every seventh token."""

    text: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self._seen = 0

    def extend(self, tokens: list[int]) -> None:
        self._seen += len(tokens)

    def draft(self, limit: int) -> list[int]:
        coming = self.text[self._seen : self._seen + limit]
        return [token if (self._seen + ahead) % 7 else token ^ 1 for ahead, token in enumerate(coming)]


@pytest.mark.parametrize("temperature", [0, 1.0])
async def test_speculation_changes_no_text_and_saves_steps(
    model: Path, prompt: tuple[int, ...], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = GenerationRequest(prompt, max_tokens=120, temperature=temperature, seed=5, logprobs=0)
    monkeypatch.setattr("core.coordinator.generator.Drafter", Foresight)
    monkeypatch.setattr("core.coordinator.speculation.Speculation._pays", lambda _: True)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", speculation=False) as cluster:
            await cluster.ready()
            plain = await deltas_of(cluster, request)
            assert len(sent(cluster, "RUN_DECODE")) == 119
        Foresight.text = [*prompt, *(each.token for delta in plain for each in delta.logprobs)]
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            drafted = await deltas_of(cluster, request)
            assert "".join(delta.text for delta in drafted) == "".join(delta.text for delta in plain)
            assert [delta.tokens for delta in drafted][-1] == 120
            assert len(sent(cluster, "RUN_DECODE")) < 60
            expected = [each.logprob for delta in plain for each in delta.logprobs]
            assert [each.logprob for delta in drafted for each in delta.logprobs] == pytest.approx(expected, abs=1e-4)


async def deltas_of(cluster: MemoryCluster, request: GenerationRequest) -> list[Delta]:
    async with cluster.coordinator.generate(request) as generation:
        return [delta async for delta in generation]


@pytest.mark.parametrize("rows", [7, 512])
async def test_a_prompts_log_probabilities_are_the_oracles(model: Path, prompt: tuple[int, ...], rows: int) -> None:
    logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", max_chunk=rows) as cluster:
            await cluster.ready()
            for max_tokens in (0, 3):
                request = GenerationRequest(prompt, max_tokens=max_tokens, temperature=0, prompt_logprobs=2)
                async with cluster.coordinator.generate(request) as generation:
                    deltas = [delta async for delta in generation]
                    told = generation.prompt_logprobs
                assert deltas[-1].tokens == max_tokens
                assert deltas[-1].finish_reason == "length"
                assert [each.token for each in told] == list(prompt)
                assert told[0].logprob is None
                assert [each.logprob for each in told[1:]] == pytest.approx(expected, abs=1e-3)
                assert all(len(each.top) == 2 for each in told[1:])


async def test_a_seed_gives_its_text_whatever_else_runs(model: Path, prompt: tuple[int, ...]) -> None:
    request = GenerationRequest(prompt, max_tokens=TOKENS, temperature=1.0, top_p=0.9, seed=42)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b") as cluster:
            await cluster.ready()
            [alone] = await texts(cluster, request)
            others = [GenerationRequest(LONG[:n], max_tokens=TOKENS, temperature=1.2, seed=n) for n in range(5, 12)]
            assert (await texts(cluster, request, *others))[0] == alone


async def test_one_that_a_stage_fails_takes_nobody_with_it(
    model: Path, prompt: tuple[int, ...], oracle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Stage.run

    def faulty(stage: Stage, hidden: torch.Tensor, segments: Any, **kwargs: Any) -> torch.Tensor:
        if any(segment.session == 3 and segment.position >= 25 for segment in segments):
            raise StageError("not finite")
        return run(stage, hidden, segments, **kwargs)

    monkeypatch.setattr(Stage, "run", faulty)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", speculation=False) as cluster:
            await cluster.ready()
            async with trio.open_nursery() as nursery:
                others = [await start(cluster, nursery, prompt) for _ in range(4)]
            errors = [each.error for each in others]
            assert [type(error) for error in errors].count(StageError) == 1
            assert [await each.result() for each in others if each.error is None] == [oracle] * 3


async def test_one_that_leaves_its_grammar_takes_nobody_with_it(
    model: Path, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_complex(_: Matcher, __: int) -> None:
        raise StageError("the text has left its grammar")

    monkeypatch.setattr(Matcher, "accept", too_complex)
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            alone = await cluster.text(prompt, TOKENS)

            async def constrained() -> None:
                with pytest.raises(StageError, match="grammar"):
                    await text_of(cluster, replace(greedy(prompt), grammar=Grammar("json_object")))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(constrained)
                assert await texts(cluster, greedy(prompt)) == [alone]


async def text_of(cluster: MemoryCluster, request: GenerationRequest) -> str:
    async with cluster.coordinator.generate(request) as generation:
        return "".join([delta.text async for delta in generation])


async def start(cluster: MemoryCluster, nursery: trio.Nursery, prompt: tuple[int, ...]) -> Any:
    from core.testing.cluster_in_memory import RunningText

    running = RunningText()
    nursery.start_soon(running.run, cluster.coordinator, greedy(prompt))
    return running


async def test_whoever_does_not_read_is_waited_for(model: Path, prompt: tuple[int, ...]) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", speculation=False) as cluster:
            await cluster.ready()
            async with cluster.coordinator.generate(greedy(prompt, 200)) as generation:
                deltas = aiter(generation)
                await anext(deltas)
                await cluster.until(lambda _: len(sent(cluster, "RUN_DECODE")) >= READ_AHEAD)
                await cluster.text(prompt, 60)
                assert len([r for r in sent(cluster, "RUN_DECODE") if r["segments"][0][0] == 1]) <= READ_AHEAD + 1
                assert len([delta async for delta in deltas]) == 199
