"""Who has joined: each member's link, what it offers, and the hops that it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256

import trio

from core.coordinator.changes import Changes
from core.coordinator.hop import Answer, Hop, HopState
from core.coordinator.journal import Journal
from core.errors import ChannelClosed, ProtocolError
from core.link import Link
from core.protocol.fields import Holding, Span
from core.protocol.messages import (
    Error,
    ErrorCode,
    Hello,
    LoadProgress,
    Message,
    NodeState,
)
from core.trust.register import KnownNode

FAILED_SECONDS, MAX_FAILED_SECONDS = 30.0, 600.0
"""How long a node that could not load its layers, or broke the protocol, is left out of plans: the first time, and at
most. Each time that follows within ten minutes doubles it."""
_MAX_NEWS, _NEWS_SECONDS = 200, 10.0
"""A node tells of itself four times in a second, and when it is told to let go of something."""
_REMEMBERED = 256
"""How many nodes that failed lately are known again when they come back."""


class MemberState(Enum):
    """What a member is seen to be at. It follows from its hops, and from whether it takes any."""

    IDLE = "idle"
    SPARE = "spare"
    LOADING = "loading"
    LOADED = "loaded"
    READY = "ready"
    PAUSED = "paused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why, when by trio's clock, and for how many seconds its node is left out of plans."""

    reason: str
    at: float
    seconds: float

    @classmethod
    def after(cls, previous: Failure | None, reason: str) -> Failure:
        """One that comes while its node is left out is the same trouble, and one that comes soon after is worse."""
        seconds = FAILED_SECONDS
        if previous is not None and previous.counts:
            seconds = previous.seconds if previous.is_recent else min(2 * previous.seconds, MAX_FAILED_SECONDS)
        return cls(reason, trio.current_time(), seconds)

    @property
    def is_recent(self) -> bool:
        return trio.current_time() - self.at < self.seconds

    @property
    def counts(self) -> bool:
        """Whether another one would be held to be the same trouble."""
        return trio.current_time() - self.at < self.seconds + MAX_FAILED_SECONDS


class Member:
    """One node for the length of one connection. `scope` is its handler's: cancelling it ends the connection.

    What is true of its part in one route is in its `hops`.
    """

    def __init__(self, hello: Hello, link: Link, credential: KnownNode | None = None) -> None:
        self.node_id = credential.node_id if credential else hello.node_id
        self.hello = hello
        self.link = link
        self.credential = credential
        """What the register has on it; None for a node that came over loopback."""
        self.is_local = False
        """Whether the coordinator started it, on its own machine."""
        self.shares_memory_with = 1
        """How many nodes fill the memory that it has measured."""
        self.fingerprint = sha256(hello.certificate).digest() if hello.certificate else None
        """Of the certificate that its neighbours will be shown."""
        self.scope = trio.CancelScope()
        self.hops: list[Hop] = []
        """Those of routes that serve or are being built, the newest last."""
        self.stand_ins: list[Hop] = []
        """Layers that it has at hand for a hop that another member may lose."""
        self.paused = hello.paused
        """Why it takes no layers for now; "" if it does."""
        self.leaves = False
        """It is paused because it is about to end."""
        self.excused = False
        """It is paused, and nobody is served by it."""
        self.is_spare = False
        """Routes do without it."""
        self.is_left_out = False
        """It was told that it gets no layers as it is."""
        self.detail = ""
        self.progress: tuple[int, int] | None = None
        self.reported = NodeState(
            0,
            0,
            0,
            hello.free_memory,
            holdings=hello.holdings,
            layer_times=hello.layer_times,
            on_disk=hello.on_disk,
            load_speed=hello.load_speed,
        )
        self.excess = 0.0
        """Seconds for each byte that a row reads on it, beyond what it says: it was seen to be so much slower."""
        self.charged_at = 0.0
        """When that was found, by trio's clock."""
        self._news: deque[float] = deque(maxlen=_MAX_NEWS)
        """When the last ones came."""
        self.failure: Failure | None = None
        """Its last one."""
        self.gone_because = ""
        self.farewell: Error | None = None
        """What it is told at the end, if it was dismissed."""

    @property
    def state(self) -> MemberState:
        if self.excused:
            return MemberState.PAUSED
        if self.hops:
            states = {hop.state for hop in self.hops}
            first = next(state for state in (HopState.LOADING, HopState.READY, HopState.LOADED) if state in states)
            return MemberState(first.value)
        if self.failed_lately:
            return MemberState.FAILED
        return MemberState.SPARE if self.is_spare else MemberState.IDLE

    @property
    def layers(self) -> range | None:
        """Of its newest hop."""
        return self.hops[-1].layers if self.hops else None

    @property
    def kv_room(self) -> int:
        """Bytes of KV cache for which it has memory, over all its hops."""
        return self.reported.kv_room // self.shares_memory_with

    @property
    def is_available(self) -> bool:
        """Whether it takes layers."""
        return not self.paused and not self.failed_lately

    @property
    def failed_lately(self) -> bool:
        return self.failure is not None and self.failure.is_recent

    @property
    def _failure_lately(self) -> str:
        return self.failure.reason if self.failure is not None and self.failure.is_recent else ""

    @property
    def absence(self) -> str:
        return "left" if self.leaves else "is paused"

    def holds(self, wanted: Holding) -> frozenset[int]:
        """The layers that it has in memory, of those which `wanted` names and which are packed as that says."""
        alike = [one for one in self.reported.holdings if _same_kind(one, wanted)]
        return _within(wanted, [span for one in alike for span in one.layers])

    def has_on_disk(self, wanted: Holding) -> frozenset[int]:
        """The layers that it need not download, of those which `wanted` names."""
        alike = [one for one in self.reported.on_disk if one.manifest == wanted.manifest]
        return _within(wanted, [span for one in alike for span in one.layers])

    def holds_others(self, wanted: Holding) -> bool:
        """Whether it has layers in memory that are packed otherwise, or of another checkpoint."""
        return any(one.layers and not _same_kind(one, wanted) for one in self.reported.holdings)

    def add(self, hop: Hop) -> None:
        self.hops.append(hop)
        self.is_spare, self.detail = False, ""

    def drop(self, hop: Hop) -> None:
        if hop in self.hops:
            self.hops.remove(hop)
            self.progress = None

    def spare(self, detail: str) -> None:
        """Routes do without it, for this reason, or because it has failed."""
        self.is_spare, self.progress = True, None
        self.detail = self._failure_lately or detail

    def rest(self) -> None:
        """There is no route that could do without it."""
        if self.is_spare:
            self.is_spare, self.detail = False, self._failure_lately

    def show(self, phase: str, progress: tuple[int, int]) -> None:
        """How far its load is."""
        self.detail, self.progress = phase, progress

    def loaded(self) -> None:
        """Its load has come to an end."""
        self.detail, self.progress = "", None

    def pause(self, reason: str, *, leaves: bool = False) -> None:
        """Or ends the pause, if there is no reason."""
        self.paused, self.leaves = reason, leaves
        if not reason:
            self.excused, self.detail = False, ""

    def excuse(self) -> None:
        """Nobody is served by it: it may rest."""
        self.excused, self.progress = True, None
        self.detail = f"it {self.absence}: {self.paused}"

    def fail(self, reason: str) -> None:
        """It is left out of the next plans for a while."""
        self.failure, self.detail, self.progress = Failure.after(self.failure, reason), reason, None

    def count_news(self) -> None:
        """It told of itself once more, which costs time that belongs to those who generate. Raises ProtocolError where
        that is too often."""
        now = trio.current_time()
        if len(self._news) == _MAX_NEWS and now - self._news[0] < _NEWS_SECONDS:
            raise ProtocolError(f"node {self.node_id!r} told of itself {_MAX_NEWS} times within {_NEWS_SECONDS:g} s")
        self._news.append(now)

    def has_failed(self, failure: Failure | None) -> None:
        """On its last connection, if it did."""
        self.failure = failure
        self.detail = self._failure_lately

    def post(self, answer: Answer) -> None:
        """Hands an answer to the hop that it comes from; of one that has ended, nobody waits for it.

        A node loads for one hop at a time: while it does, the others are not given up.
        """
        for hop in (*self.hops, *self.stand_ins):
            waits_its_turn = isinstance(answer, LoadProgress) and hop.state is HopState.LOADING
            if hop.number == answer.hop or waits_its_turn:
                hop.post(answer)

    def order(self, message: Message) -> None:
        """Tells it what it must hear. One that takes no messages any more is let go of."""
        if not self.link.try_send(message) and not self.gone_because:
            self.dismiss(Error(ErrorCode.PROTOCOL, "it has taken no messages for too long"))

    def dismiss(self, farewell: Error) -> None:
        """Ends its connection, telling it why."""
        self.leave(farewell.message)
        self.farewell = farewell
        self.scope.cancel()

    def leave(self, reason: str) -> None:
        self.gone_because = reason
        for hop in (*self.hops, *self.stand_ins):
            hop.close()


def _within(wanted: Holding, spans: Iterable[Span]) -> frozenset[int]:
    """The layers of `spans` that `wanted` may name. However many spans there are, each layer is looked at once."""
    layers, seen, found = max(span.end for span in wanted.layers), 0, set[int]()
    for start, end in sorted((span.start, span.end) for span in spans):
        found.update(range(max(start, seen), min(end, layers)))
        seen = max(seen, end)
    return frozenset(found)


def _same_kind(one: Holding, other: Holding) -> bool:
    return (one.manifest, one.quant, one.dtype) == (other.manifest, other.quant, other.dtype)


class Members:
    """The members by id, in the order in which they joined."""

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal = journal or Journal()
        self.register_changes = 0
        """How often the register was another one."""
        self._changes = Changes()
        self._by_id: dict[str, Member] = {}
        self._failures: dict[str, Failure] = {}
        """Of nodes that have gone: to come back is not to be chosen again."""
        self._excesses: dict[str, tuple[float, float]] = {}
        """Of nodes that have gone: nor to be believed again."""

    @property
    def changes(self) -> int:
        """How often someone has joined, left or changed state."""
        return self._changes.count

    def all(self) -> list[Member]:
        return list(self._by_id.values())

    def available(self) -> list[Member]:
        """Those that take layers."""
        return [member for member in self.all() if member.is_available]

    def find(self, node_id: str) -> Member | None:
        return self._by_id.get(node_id)

    def add(self, member: Member) -> None:
        """A node that joins again, before its old connection was noticed to be dead, takes the old one's place."""
        old = self._by_id.pop(member.node_id, None)
        if old is not None:
            old.dismiss(Error(ErrorCode.REPLACED, f"a node joined later as {old.node_id!r}"))
        member.has_failed(old.failure if old is not None else self._failures.get(member.node_id))
        found = (old.excess, old.charged_at) if old is not None else self._excesses.get(member.node_id, (0.0, 0.0))
        member.excess, member.charged_at = found
        self._by_id[member.node_id] = member
        self.journal.note(f"{member.node_id} joined, with {member.hello.selected_device}")
        self.notify()

    def remove(self, member: Member, reason: str) -> None:
        if self._by_id.get(member.node_id) is member:
            del self._by_id[member.node_id]
            member.leave(reason)
            self.journal.note(f"{member.node_id} left: {reason}")
            self._remember(member)
            self.notify()

    def _remember(self, gone: Member) -> None:
        if gone.failure is not None:
            self._failures[gone.node_id] = gone.failure
        recent = [(node_id, failure) for node_id, failure in self._failures.items() if failure.counts]
        self._failures = dict(recent[-_REMEMBERED:])
        excesses = {**self._excesses, gone.node_id: (gone.excess, gone.charged_at)}
        self._excesses = dict([(node_id, found) for node_id, found in excesses.items() if found[0]][-_REMEMBERED:])

    def spare(self, reasons: Mapping[str, str]) -> None:
        """A route serves: whoever has no part in any is spare, for the reason by its id or for none."""
        for member in self.all():
            idle = not member.hops and not member.paused
            if idle and (member.node_id in reasons or not member.is_spare):
                member.spare(reasons.get(member.node_id, "the cluster serves without it"))

    def rest(self) -> None:
        """There is no route."""
        for member in self.all():
            member.rest()

    async def say_goodbye(self, message: Message) -> None:
        """The last message to each; whoever does not take it within a second goes without."""
        async with trio.open_nursery() as nursery:
            for member in self.all():
                nursery.start_soon(_end_with, member.link, message)

    def notify(self) -> None:
        self._changes.notify()

    async def wait_change(self, since: int) -> None:
        """Until there are more than `since` changes. May be cut short by a deadline of the caller's."""
        await self._changes.wait(since)


async def _end_with(link: Link, message: Message) -> None:
    try:
        await link.end_with(message)
    except ChannelClosed:
        return
