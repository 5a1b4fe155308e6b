"""Counts what sessions and batches come to, and tells whoever watches: bounded, whatever the watchers do."""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import trio

from core.coordinator.batch import Batch
from core.coordinator.chunk_sizing import Average
from core.coordinator.hop import Hop
from core.coordinator.journal import Journal
from core.coordinator.route import Route
from core.coordinator.session import Session, Status
from core.coordinator.token_times import TokenTimes
from core.interfaces.telemetry import HopStatus, Metric, PaceStatus, Phase, Sample, SessionStatus
from core.protocol.messages import HiddenState

TELL_SECONDS = 0.25
"""Between two words on one session's progress."""
_WATCH_QUEUE = 256
MAX_COUNTED_NODES = 1024
RATE_SECONDS = 10.0
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class TokenRate:
    """Tokens per second over the last ten seconds."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque(maxlen=16_384)

    def count(self, tokens: int) -> None:
        self._counts.append((time.monotonic(), tokens))

    def per_second(self) -> float:
        now = time.monotonic()
        while self._counts and now - self._counts[0][0] > RATE_SECONDS:
            self._counts.popleft()
        return sum(tokens for _, tokens in self._counts) / RATE_SECONDS


class Histogram:
    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def sample(self) -> Sample:
        return Sample(self._sum, buckets=tuple(zip(self._bounds, itertools.accumulate(self._counts), strict=True)))


class _Hop:
    """One hop's averages over decode steps in microseconds, and its sums in seconds over all batches."""

    def __init__(self, hop: Hop) -> None:
        self.node_id = hop.member.node_id
        self.layers, self.weight_bytes = (hop.layers.start, hop.layers.stop), hop.weight_bytes
        self.queue, self.compute = Average(), Average()
        self.queue_seconds = self.compute_seconds = 0.0

    def add(self, queue_us: int, compute_us: int, decodes: bool) -> None:
        self.queue_seconds += queue_us / 1e6
        self.compute_seconds += compute_us / 1e6
        if decodes:
            self.queue.add(queue_us)
            self.compute.add(compute_us)

    def status(self) -> HopStatus:
        queue_ms, compute_ms = ((each.value or 0) / 1000 for each in (self.queue, self.compute))
        return HopStatus(self.node_id, queue_ms, compute_ms, self.layers, self.weight_bytes)


class Telemetry:
    """Lives in trio. Its counters go on over routes; the hops' averages begin with each."""

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal = journal or Journal()
        self.tokens_by_node: dict[str, int] = {}
        """How many have passed a node's layers, prompts included."""
        self.wire = Average()
        """Of a decode step's time, what it spent neither waiting nor computing on a hop, in milliseconds."""
        self.rate = TokenRate()
        self.times = TokenTimes()
        self._totals: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._ttft, self._gaps, self._rows = (
            Histogram(),
            Histogram(),
            Histogram((1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
        )
        self._hops: list[_Hop] = []
        self._epoch = 0
        self._outage_seconds = 0.0
        self._wire_seconds = 0.0
        self._watchers: set[trio.MemorySendChannel[SessionStatus | PaceStatus]] = set()

    def route_began(self, route: Route) -> None:
        self._epoch = route.epoch
        self._hops = [_Hop(hop) for hop in route.hops]
        self.wire = Average()
        self.times.route_began()

    def passed(self, route: Route, batch: Batch, answer: HiddenState, seconds: float) -> None:
        """A batch came back after so long. Averages are of the newest route."""
        if route.epoch == self._epoch:
            for hop, queue_us, compute_us in zip(self._hops, answer.queue_us, answer.compute_us, strict=False):
                hop.add(queue_us, compute_us, batch.decodes)
        wire = max(0.0, seconds - (sum(answer.queue_us) + sum(answer.compute_us)) / 1e6)
        self._wire_seconds += wire
        if batch.decodes:
            self.wire.add(1000 * wire)
        for node_id in {hop.member.node_id for hop in route.hops}:
            self._count_node(node_id, len(batch.tokens))
        self._totals["batches"] += 1
        self._rows.add(len(batch.tokens))
        self._totals["hidden_bytes"] += len(answer.hidden.data)

    def _count_node(self, node_id: str, tokens: int) -> None:
        self.tokens_by_node[node_id] = self.tokens_by_node.pop(node_id, 0) + tokens
        if len(self.tokens_by_node) > MAX_COUNTED_NODES:
            del self.tokens_by_node[next(iter(self.tokens_by_node))]

    def stepped(self, route: Route, seconds: float, on_route: float) -> None:
        """One row was decoded while nobody else was served: in all, and on the route."""
        if route.epoch == self._epoch:
            self.times.note(seconds, on_route)

    def came(self, session: Session) -> None:
        self.journal.sessions_changed(1)
        self._totals["requests"] += 1
        self.tell(session)

    def let_in(self, session: Session) -> None:
        """It begins on a route, or goes on there."""
        if session.outage:
            self._totals["recoveries"] += 1
            self._outage_seconds += session.outage
            session.outage = 0.0
        self.tell(session)

    def came_late(self) -> None:
        """A request's time was up before it was a session."""
        self._totals["requests"] += 1
        self._ended["deadline"] += 1

    def decoded(self, session: Session, tokens: int) -> None:
        """A step brought a session so many tokens."""
        clock = session.clock
        gap = clock.step()
        if clock.steps == 1:
            self._ttft.add(gap)
            self._totals["prompt_tokens"] += session.prompt_tokens
            self._totals["cached_tokens"] += session.cached_tokens
        else:
            self._gaps.add(gap / tokens)
            clock.rate.add(tokens / gap if gap else 0.0)
        self._totals["tokens"] += tokens
        self.rate.count(tokens)
        self.journal.count(tokens)
        if session.is_over or clock.steps == 1 or clock.due(TELL_SECONDS):
            self.tell(session)

    def left(self, session: Session) -> None:
        """It is over for good."""
        self.journal.sessions_changed(-1)
        speculation = session.decoding.speculation
        self._totals["drafted"] += speculation.drafted
        self._totals["accepted"] += speculation.accepted
        self._ended[session.ending] += 1
        self.tell(session)

    def tell(self, session: Session) -> None:
        """Lets the watchers know how it is with a session."""
        if self._watchers:
            self.tell_watchers(status_of(session))

    def tell_watchers(self, status: SessionStatus | PaceStatus) -> None:
        """One that does not keep up misses what it has no room for."""
        for watcher in list(self._watchers):
            try:
                watcher.send_nowait(status)
            except (trio.WouldBlock, trio.BrokenResourceError):
                continue

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[trio.MemoryReceiveChannel[SessionStatus | PaceStatus]]:
        """What becomes of sessions and of machines' pace, as it happens."""
        send, receive = trio.open_memory_channel[SessionStatus | PaceStatus](_WATCH_QUEUE)
        self._watchers.add(send)
        try:
            with receive:
                yield receive
        finally:
            self._watchers.discard(send)
            send.close()

    def hops(self) -> tuple[HopStatus, ...]:
        return tuple(hop.status() for hop in self._hops)

    def metrics(self) -> Iterator[Metric]:
        total = self._totals
        yield _counter("core_requests", "Generations that were asked for.", total["requests"])
        yield Metric(
            "core_requests_ended",
            "counter",
            "Generations that ended, by how: stop, length, cancelled, deadline, queue_full, queue_timeout, failed.",
            tuple(Sample(count, (("how", how),)) for how, count in sorted(self._ended.items())),
        )
        yield _counter("core_prompt_tokens", "Tokens of prompts that were answered.", total["prompt_tokens"])
        yield _counter("core_cached_prompt_tokens", "Of those, found in the nodes' caches.", total["cached_tokens"])
        yield _counter("core_generated_tokens", "Tokens decoded.", total["tokens"])
        yield _counter("core_drafted_tokens", "Tokens guessed ahead.", total["drafted"])
        yield _counter("core_accepted_tokens", "Of those, the ones that came true.", total["accepted"])
        yield _counter("core_recoveries", "Generations that went on after their route broke.", total["recoveries"])
        yield _counter("core_recovery_seconds", "Time for which they were suspended.", self._outage_seconds)
        yield _counter("core_batches", "Batches that passed the route.", total["batches"])
        yield _counter("core_hidden_bytes", "Bytes of hidden states that came back.", total["hidden_bytes"])
        yield _counter("core_wire_seconds", "Time of batches between the hops.", self._wire_seconds)
        yield _by_hop("core_hop_queue_seconds", "Time of batches waiting on a hop.", self._hops, "queue_seconds")
        yield _by_hop("core_hop_compute_seconds", "Time of batches computed on a hop.", self._hops, "compute_seconds")
        yield Metric("core_batch_rows", "histogram", "Rows of a batch.", (self._rows.sample(),))
        yield Metric("core_ttft_seconds", "histogram", "Time to a generation's first token.", (self._ttft.sample(),))
        yield Metric(
            "core_token_gap_seconds", "histogram", "Time between a generation's tokens.", (self._gaps.sample(),)
        )


_PHASES: dict[Status, Phase] = {
    Status.WAITING: "waiting",
    Status.PREFILLING: "prefill",
    Status.DECODING: "decode",
    Status.SUSPENDED: "suspended",
}


def status_of(session: Session) -> SessionStatus:
    speculation, clock, place = session.decoding.speculation, session.clock, session.place
    why = session.failure or session.lost
    return SessionStatus(
        session=session.number,
        phase=_PHASES.get(session.status, "failed" if session.failure else "done"),
        route_epoch=place.epoch if place else 0,
        prompt_tokens=session.prompt_tokens,
        cached_tokens=session.cached_tokens,
        prefilled=session.prefilled,
        tokens=session.decoded,
        tokens_per_second=clock.rate.value or 0.0,
        drafted=speculation.drafted,
        accepted=speculation.accepted,
        seconds=time.monotonic() - clock.began,
        detail=str(why) if why else "",
        recoveries=session.recoveries,
    )


def _counter(name: str, about: str, value: float) -> Metric:
    return Metric(name, "counter", about, (Sample(value),))


def gauge(name: str, about: str, value: float) -> Metric:
    return Metric(name, "gauge", about, (Sample(value),))


def _by_hop(name: str, about: str, hops: Iterable[_Hop], field: str) -> Metric:
    return Metric(name, "counter", about, tuple(Sample(getattr(hop, field), (("node", hop.node_id),)) for hop in hops))
