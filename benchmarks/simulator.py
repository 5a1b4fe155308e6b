"""What the simulator says of `many.py` and `distance.py`, beside what these measure: streams, gaps, turns, far hops.

Each round probes the real cluster while nothing else runs on it: how long its stages, its head and its messages take.
The simulator is told these times, of the same round, and nothing of what was measured. Ratios are simulated to
measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

import torch
import trio
from _measure import local_cluster, machine, spread, verdict
from distance import far_apart
from many import LONG_PROMPT, STREAMS, TOKENS, collect, endless, p95, prose, rate, talking, ttft, until

from core.cli.serve import Server
from core.interfaces.dtypes import DType
from core.protocol.fields import Segment
from core.protocol.messages import ClearCache, HiddenState, Run, RunDecode, RunPrefill
from core.runtime.sampling import Sampler, choose, finite_rows
from core.runtime.sampling_params import SamplingParams
from core.testing.simulator import Coordinator, Description, Load, Machine, Model, Report, Wire, simulate

LAYERS, NODES, MESSAGES = 30, 2, 3
PROMPT = 40
STEPS = 24
FAR_STREAMS, FAR_MS, ALONE = 4, 20.0, 40
CHUNKS = (16, 32, 64, 256, 512)
WITHIN = 0.15
_sessions = count(10**9)


@dataclass
class Times:
    """Milliseconds by rows: of a stage, the mean of the stages, and of the head.

    `message` is what a message takes beside, `wake` how long the idle stages wait for their thread. `context` is what
    1,000 tokens of context add to a row in a stage, `cache` to a session there. `scatter` has the factors by which the
    steps of a stage differed from their mean.
    """

    stage: dict[int, float] = field(default_factory=dict)
    head: dict[int, float] = field(default_factory=dict)
    message: float = 0.0
    wake: float = 0.0
    context: float = 0.0
    cache: float = 0.0
    scatter: tuple[float, ...] = ()


@dataclass(frozen=True)
class Step:
    answer: HiddenState
    seconds: float
    head_seconds: float


class Prober:
    """Sends batches of `text` through the route that serves, as the scheduler does, while no session is on it."""

    def __init__(self, server: Server, text: Sequence[int]) -> None:
        self._text = text
        live = server.coordinator._live
        assert live is not None and live.generator is not None
        service = live.generator.router.serving
        assert service is not None
        self._route, self._head = service.route, service.scheduler._head
        self._compute, self._hop = service.scheduler._compute, service.route.hops[0].number

    async def decode(self, rows: int, in_flight: int) -> Times:
        """Of batches of `rows` sessions, so many batches at once."""
        steps: list[Step] = []
        async with trio.open_nursery() as nursery:
            for _ in range(in_flight):
                nursery.start_soon(self._decode, rows, steps)
        waited = [sum(step.answer.queue_us) / 1e3 for step in steps]
        computed = [sum(step.answer.compute_us) / 1e3 for step in steps]
        on_wires = [1e3 * step.seconds - sum(both) for step, *both in zip(steps, waited, computed, strict=True)]
        return Times(
            {rows: statistics.mean(computed) / NODES},
            {rows: 1e3 * statistics.mean(step.head_seconds for step in steps)},
            statistics.mean(on_wires) / MESSAGES,
            statistics.mean(waited) / MESSAGES,
            scatter=tuple(
                factor for stage in zip(*(s.answer.compute_us for s in steps), strict=True) for factor in by_mean(stage)
            ),
        )

    async def prefill(self) -> Times:
        """Of chunks at a prompt's beginning, and what context adds: each once more than is counted, to be warm."""
        times = Times()
        for rows in CHUNKS * 2:
            session = next(_sessions)
            times.stage[rows] = await self._chunk(session, 0, rows)
        many, few = CHUNKS[-1], CHUNKS[1]
        late = [await self._chunk(session, start, many) for start in (512, 1024, 1536)][-1]
        later = [await self._chunk(session, 2048, few) for _ in range(2)][-1]
        await self._route.command(ClearCache(self._hop, [session]))
        # Of a thousand tokens: `context` for each row, and `cache` once.
        of_many, of_few = (late - times.stage[many]) / 1.536, (later - times.stage[few]) / 2.048
        times.context = max(0.0, (of_many - of_few) / (many - few))
        times.cache = max(0.0, of_few - few * times.context)
        return times

    async def _chunk(self, session: int, start: int, rows: int) -> float:
        """Milliseconds that a stage took."""
        hidden = await self._compute.run(self._head.embed, self._text[start : start + rows])
        answer = await self._route.run(RunPrefill(self._hop, [Segment(session, start, rows, 1)], hidden))
        return statistics.mean(answer.compute_us) / 1e3

    async def _decode(self, rows: int, steps: list[Step]) -> None:
        sessions = [next(_sessions) for _ in range(rows)]
        for session in sessions:
            await self._chunk(session, 0, PROMPT)
        hidden = await self._compute.run(self._head.embed, self._text[:rows])
        for position in range(PROMPT, PROMPT + STEPS):
            segments = [Segment(session, position, 1, 1) for session in sessions]
            steps.append(await self._step(RunDecode(self._hop, segments, hidden)))
        await self._route.command(ClearCache(self._hop, sessions))

    async def _step(self, batch: Run) -> Step:
        ticket = await self._route.submit(batch)
        job = self._compute.job(self._head_seconds, ticket.done)
        answer = await self._route.answer(ticket, begin=job.start)
        return Step(answer, ticket.seconds, await job.wait())

    @torch.inference_mode()
    def _head_seconds(self, answer: HiddenState) -> float:
        """What logits, a greedy choice and the next embedding take."""
        started, rows = time.perf_counter(), answer.hidden.rows
        logits = self._head._embed_and_head.logits(self._head._rows(answer.hidden, rows))
        finite_rows(logits)
        self._head.embed(choose(logits, [Sampler(SamplingParams(temperature=0))] * rows, range(rows)))
        return time.perf_counter() - started


async def prober_of(server: Server) -> Prober:
    [text] = await prose(server.coordinator, 1, LONG_PROMPT)
    return Prober(server, text * 2)


@dataclass(frozen=True)
class Case:
    """A figure that was measured, and where a simulation of `description` has it."""

    name: str
    measured: float
    description: Description
    read: Callable[[Report], float]


async def streams(dtype: DType, rounds: int) -> AsyncIterator[Case]:
    """As `many.py` has it."""
    async with local_cluster(dtype, speculation=False, prefix_cache=False) as server:
        async for case in one_and_several(server, STREAMS, rounds, delay_ms=0.0):
            yield case


async def far(dtype: DType, rounds: int) -> AsyncIterator[Case]:
    """As `distance.py` has it."""
    with far_apart(FAR_MS):
        async with local_cluster(dtype, transport="distant", speculation=False, prefix_cache=False) as server:
            async for case in one_and_several(server, FAR_STREAMS, rounds, delay_ms=FAR_MS):
                yield case


async def one_and_several(server: Server, several: int, rounds: int, *, delay_ms: float) -> AsyncIterator[Case]:
    prompts, prober = await prose(server.coordinator, several, PROMPT), await prober_of(server)
    where = "far, " if delay_ms else ""
    for _ in range(rounds):
        wake = 0.0
        for name, number in (("one stream", 1), (f"{several} streams", several)):
            in_flight = min(number, NODES)
            before = await prober.decode(number // in_flight, in_flight)
            tokens_per_second = await rate(server.coordinator, prompts[:number])
            times = averaged(before, await prober.decode(number // in_flight, in_flight))
            wake = times.wake if number == 1 else wake
            description = described(replace(times, wake=wake), talkers(number), delay_ms)
            yield Case(f"{where}{name}, tokens/s", tokens_per_second, description, steady)


async def gap(dtype: DType, rounds: int) -> AsyncIterator[Case]:
    """As `many.py` has it."""
    async with local_cluster(dtype, speculation=False, prefix_cache=False) as server:
        [short] = await prose(server.coordinator, 1, PROMPT)
        [long] = await prose(server.coordinator, 1, LONG_PROMPT)
        prober = await prober_of(server)
        for _ in range(rounds):
            decode, before = await prober.decode(1, 1), await prober.prefill()
            async with talking(server.coordinator, short) as came:
                await until(lambda came=came: len(came) >= ALONE)
                first = len(came)
                await collect(server.coordinator, endless(long, 1), lambda _: None)
                beside = came[first - 1 : len(came)]
            alone, times = came[5:first], joined(decode, averaged(before, await prober.prefill()))
            load = (*talkers(1, ALONE * 20), prefilled(len(long), came[first - 1] - came[0]))
            description = described(times, load)
            yield Case("gap beside a prefill, x alone", p95(beside) / p95(alone), description, gap_ratio)
            ratio = middle_gap(beside) / middle_gap(alone)
            yield Case("median gap beside, x alone", ratio, description, middle_gap_ratio)


def prefilled(tokens: int, starts: float) -> Load:
    return Load(name="long", starts=starts, streams=1, prompt=(tokens, tokens), answer=(1, 1))


def gap_ratio(report: Report) -> float:
    alone, beside = gaps(report)
    return p95(beside) / p95(alone)


def middle_gap_ratio(report: Report) -> float:
    alone, beside = gaps(report)
    return middle_gap(beside) / middle_gap(alone)


def gaps(report: Report) -> tuple[list[float], list[float]]:
    """When the talker's tokens came, before the long prompt was asked for and until it was prefilled."""
    talker, long = sorted(report.streams, key=lambda stream: stream.prompt_tokens)
    beside = [at for at in talker.tokens if long.asked <= at <= long.tokens[0]]
    return [at for at in talker.tokens[5:] if at < long.asked], beside


def middle_gap(times: Sequence[float]) -> float:
    return statistics.median(later - earlier for earlier, later in pairwise(times))


async def turns(dtype: DType, rounds: int) -> AsyncIterator[Case]:
    """As `many.py` has it."""
    async with local_cluster(dtype) as server:
        prober = await prober_of(server)
        for prompt in await prose(server.coordinator, rounds, LONG_PROMPT):
            decode, before = await prober.decode(1, 1), await prober.prefill()
            first, answer = await ttft(server.coordinator, prompt)
            second, _ = await ttft(server.coordinator, (*prompt, *answer, *prompt[:30]))
            times = joined(decode, averaged(before, await prober.prefill()))
            load = Load(streams=1, turns=2, prompt=(len(prompt),) * 2, follow_up=(30, 30), answer=(20, 20))
            description = described(times, (load,), prefix_cache=True)
            yield Case("first turn's TTFT, s", first, description, lambda report: report.streams[0].ttft)
            yield Case("second turn's TTFT, s", second, description, lambda report: report.streams[1].ttft)


def talkers(streams: int, tokens: int = TOKENS) -> tuple[Load, ...]:
    return (Load(streams=streams, prompt=(PROMPT, PROMPT), answer=(tokens, tokens)),)


def steady(report: Report) -> float:
    return report.steady_throughput


def averaged(before: Times, after: Times) -> Times:
    """What was taken before and after a measurement."""

    def mean(one: dict[int, float], other: dict[int, float]) -> dict[int, float]:
        return {rows: (one[rows] + other[rows]) / 2 for rows in one}

    return Times(
        mean(before.stage, after.stage),
        mean(before.head, after.head),
        (before.message + after.message) / 2,
        (before.wake + after.wake) / 2,
        (before.context + after.context) / 2,
        (before.cache + after.cache) / 2,
        before.scatter + after.scatter,
    )


def by_mean(values: Sequence[float]) -> list[float]:
    mean = statistics.mean(values)
    return [value / mean for value in values]


def joined(decode: Times, prefill: Times) -> Times:
    return replace(decode, stage=decode.stage | prefill.stage, context=prefill.context, cache=prefill.cache)


def described(
    times: Times, load: tuple[Load, ...], delay_ms: float = 0.0, *, prefix_cache: bool = False
) -> Description:
    """Two machines that hold half of the demo's model each, as the benchmarks have them."""
    each, message = LAYERS // NODES, max(0.0, times.message - delay_ms) + times.wake
    node = Machine(
        name="node",
        count=NODES,
        memory_gb=4,
        layer_ms=tuple((rows, ms / each) for rows, ms in times.stage.items()),
        context_ms=times.context / each,
        cache_ms=times.cache / each,
        scatter=times.scatter or (1.0,),
        message_ms=message,
    )
    return Description(
        model=Model(layers=LAYERS, layer_mb=15, kv_kb=1.5, hidden_size=576),
        machines=(node,),
        coordinator=Coordinator(head_ms=tuple(times.head.items()), message_ms=message),
        wires=Wire(delay_ms=delay_ms),
        load=load,
        settings={"min_nodes": NODES, "max_nodes": NODES, "prefix_cache": prefix_cache},
    )


PARTS = {"streams": streams, "gap": gap, "turns": turns, "far": far}


async def measured(part: str, dtype: DType, rounds: int) -> list[Case]:
    return [case async for case in PARTS[part](dtype, rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", type=DType, default=DType.FP32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, action="append")
    asked = parser.parse_args()
    print(machine(), flush=True)
    for part in asked.only or PARTS:
        compare(trio.run(measured, part, asked.dtype, asked.rounds))


def compare(cases: Sequence[Case]) -> None:
    """Simulates now that no cluster runs in this process any more: its time is not the simulation's."""
    found: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        found.setdefault(case.name, []).append((case.measured, case.read(simulate(case.description))))
    for name, pairs in found.items():
        ratios = [simulated / real for real, simulated in pairs]
        print(f"{name:<30} measured  {spread([real for real, _ in pairs], digits=3)}")
        print(f"{name:<30} simulated {spread([simulated for _, simulated in pairs], digits=3)}")
        print(f"{name:<30} ratio     {spread(ratios)}")
        reached = abs(statistics.median(ratios) - 1) <= WITHIN
        print(verdict(f"{name}: simulated within {WITHIN:.0%} of measured", reached), flush=True)


if __name__ == "__main__":
    main()
