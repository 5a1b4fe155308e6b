"""A route: a plan that is loaded, linked and proven. Batches go in at the first hop and come out of the last."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import trio

from core.coordinator.hop import DIRECT, Hop
from core.coordinator.members import Member
from core.errors import (
    ChannelClosed,
    CoreError,
    NoKVRoom,
    ProtocolError,
    RouteError,
    StageError,
    WrongAnswer,
    sole_error,
)
from core.protocol.codec import Packet
from core.protocol.fields import Segment, Tensor, clipped
from core.protocol.messages import (
    CacheCommand,
    HiddenState,
    InferenceError,
    PeerLost,
    Run,
)
from core.runtime.session_cost import longest_session

T = TypeVar("T")
STALL_SECONDS = 120.0
"""A route is given up if a batch whose turn it is does not come out for so long."""
SKIPPED_SECONDS = 10.0
"""The same for a batch that a later one has overtaken: hops keep the order."""
_MAX_COMMANDS = 4096
"""How many cache commands a hop may owe the next one."""
_IN_TIME = f"within {STALL_SECONDS:g} s"
VERDICT_SECONDS = 1.5
"""Whoever died is seen to be gone from here as well, at once or a heartbeat later than from its neighbour."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A batch that is in flight. `done` is set by what begins with its result, or when it fails.

    `seconds` is how long it took, `reached` the place in the route of the hop that it was last relayed to. The route
    is given up when the deadline of `patience` passes without a result.
    """

    segments: Sequence[Segment]
    width: int
    dtype: str
    reached: int = 0
    done: trio.Event = field(default_factory=trio.Event)
    result: HiddenState | None = None
    error: CoreError | None = None
    seconds: float = 0.0
    begin: Callable[[HiddenState], None] | None = None
    patience: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_overtaken: bool = False
    _sent: float = field(default_factory=time.perf_counter)

    def succeed(self, result: HiddenState) -> None:
        self.result, self.seconds = result, time.perf_counter() - self._sent
        if self.begin is not None:
            self.begin(result)

    def fail(self, error: CoreError) -> None:
        self.error = error
        self.done.set()

    def unlike(self, hidden: Tensor, *, answers: bool) -> str:
        """What the hidden states of this batch are not, if `hidden` has another shape: its rows, or those it wants."""
        rows = sum(segment.outputs if answers else segment.rows for segment in self.segments)
        same = (hidden.rows, hidden.width, hidden.dtype) == (rows, self.width, self.dtype)
        return "" if same else f"{rows} x {self.width} in {self.dtype}"


class Route:
    """The live chain of hops of one epoch. `broken` is set once, by `fail`; a broken route never recovers."""

    def __init__(self, epoch: int, hops: Sequence[Hop]) -> None:
        self.epoch = epoch
        self.hops = tuple(hops)
        self.broken = trio.Event()
        self.failure: RouteError | None = None
        self.tidied_at = math.inf
        """When its members were first told to let go of what it does without."""
        self.is_settled = False
        """Whether its members hold layers for it alone, so that they have all the KV memory which they will have."""
        self.is_doubted = False
        """Whether a session failed on it, which may be the doing of one of its nodes: it is to be proven again."""
        self.on_wrong_answer: Callable[[WrongAnswer], None] = lambda _: None
        """Told when a batch of a session was answered so."""
        self._to_relay = {hop.number: deque[CacheCommand](maxlen=_MAX_COMMANDS) for hop in self.hops[1:]}
        """The cache commands that did not reach a hop yet, if they come by the coordinator."""
        self._in_flight: dict[str, Ticket] = {}
        self._entering: set[trio.CancelScope] = set()
        self._ids = itertools.count(1)

    async def run(self, batch: Run) -> HiddenState:
        """Passes `batch` through every stage: `submit` and `answer` in one."""
        ticket = await self.submit(batch)
        return await self.answer(ticket, begin=lambda result: ticket.done.set())

    async def submit(self, batch: Run) -> Ticket:
        """Sends `batch` on its way. Batches keep the order in which they were submitted. Raises RouteError."""
        if self.failure is not None:
            raise self.failure.again()
        request_id, ticket = self._register(batch)
        await self._enter(batch, request_id)
        return ticket

    def submit_now(self, batch: Run) -> Ticket | None:
        """As `submit`, from any thread and without waiting; None where that can't be, and nothing was sent."""
        request_id, ticket = self._register(batch)
        # A route that fails meanwhile has told this ticket, or has failed before it was registered.
        if self.failure is None and self.hops[0].member.link.send_now(batch, request_id):
            return ticket
        self._in_flight.pop(request_id, None)
        return None

    async def answer(self, ticket: Ticket, *, begin: Callable[[HiddenState], None]) -> HiddenState:
        """What came out of the last stage, once what `begin` does with it is done: that has `ticket.done` set.

        It begins as the answer comes, not when the waiting task has its turn.
        Raises RouteError where the route breaks meanwhile, and StageError where a stage refused or failed this
        batch; the route stands then.
        """
        ticket.begin = begin
        if ticket.result is not None:
            begin(ticket.result)
        ticket.patience.deadline = min(ticket.patience.deadline, trio.current_time() + STALL_SECONDS)
        with ticket.patience:
            await ticket.done.wait()
        if ticket.result is None and not ticket.done.is_set():
            self.fail(self._stalled("to a batch that was overtaken" if ticket.is_overtaken else _IN_TIME))
        await ticket.done.wait()
        if ticket.error is not None:
            raise ticket.error
        assert ticket.result is not None
        return ticket.result

    async def unless_broken(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """What `work` comes to, or raises; None if the route breaks before, which ends it."""
        found: T | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_once_broken, nursery.cancel_scope)
                found = await work()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole_error(group) from None
        return found

    async def _cancel_once_broken(self, scope: trio.CancelScope) -> None:
        await self.broken.wait()
        scope.cancel()

    @property
    def in_flight(self) -> int:
        """Batches between the first hop and the last, also those for which nobody waits."""
        return len(self._in_flight)

    @property
    def kv_tokens(self) -> int:
        """The tokens of the longest session for whose caches every hop has memory, beside what other routes use."""
        return min(_longest(hops, _room_of(hops, self.hops)) for hops in self._hops_by_member())

    @property
    def kv_capacity(self) -> int:
        """The same, if no other route used any."""
        return min(_longest(hops, hops[0].member.kv_room) for hops in self._hops_by_member())

    def fits(self, rooms: Mapping[int, int]) -> bool:
        """Whether every hop has memory for the caches of some sessions, beside what other routes use of it.

        `rooms`: how many there are by the tokens that they have room for.
        """
        return all(
            sum(hop.cache_bytes(rooms) for hop in hops) <= _room_of(hops, self.hops) for hops in self._hops_by_member()
        )

    def count_kv(self, used: Callable[[], Mapping[int, int]]) -> None:
        """`used` tells how many sessions have caches on the route, by the tokens that they have room for."""
        for hop in self.hops:
            hop.kv_used = used

    def _hops_by_member(self) -> list[list[Hop]]:
        """Those that share a member's memory."""
        return [[hop for hop in self.hops if hop.member is member] for member in self.members]

    async def command(self, command: CacheCommand) -> None:
        """Has every hop do something with its caches, in turn with the batches. On a broken route it does nothing."""
        if self.failure is None:
            for hop in self.hops[1:]:
                if hop.link != DIRECT:
                    self._to_relay[hop.number].append(command)
            with self._until_broken():
                try:
                    await self.hops[0].member.link.send(command)
                except ChannelClosed as error:
                    self.fail(self.hops[0].lost(error.reason))

    def fail(self, failure: RouteError) -> None:
        """Ends the route: whoever waits for it, or asks it later, gets a RouteError like `failure`."""
        if self.failure is not None:
            return
        self.failure = failure
        for ticket in list(self._in_flight.values()):
            ticket.fail(failure.again())
        for scope in self._entering:
            scope.cancel()
        self.broken.set()

    @property
    def members(self) -> set[Member]:
        return {hop.member for hop in self.hops}

    def hop_of(self, member: Member) -> Hop | None:
        return next((hop for hop in self.hops if hop.member is member), None)

    def member_left(self, member: Member) -> None:
        if (hop := self.hop_of(member)) is not None:
            self.fail(hop.lost(member.gone_because))

    async def take(self, member: Member, number: int, packet: Packet) -> None:
        """A message to or from the hop `number` of this route. Raises ProtocolError for one that isn't `member`'s.

        A broken route takes nothing: tokens of an answer that is late would be sampled, and told to nobody.
        """
        if self.failure is not None:
            return
        index = next(index for index, hop in enumerate(self.hops) if hop.number == number)
        message = packet.message
        if isinstance(message, (Run, CacheCommand)):
            index -= 1
        if index < 0 or self.hops[index].member is not member:
            raise ProtocolError(f"node {member.node_id!r} sent a {message.TYPE} that is not its to send")
        if isinstance(message, InferenceError):
            if (ticket := self._answered(packet)) is not None:
                ticket.fail(_stage_error(self.hops[index], message))
        elif isinstance(message, PeerLost) and len(self.hops) > 1:
            await self._peer_lost(self.hops[index], message.reason)
        elif isinstance(message, HiddenState) and index == len(self.hops) - 1:
            if (ticket := self._answered(packet)) is not None:
                if wanted := ticket.unlike(message.hidden, answers=True):
                    ticket.fail(_misshapen(self.hops[index], message.hidden, wanted))
                else:
                    ticket.succeed(message)
        elif isinstance(message, CacheCommand):
            await self._relay_command(self.hops[index + 1], packet, message)
        elif isinstance(message, Run):
            await self._relay_batch(index + 1, packet, message)
        else:
            raise ProtocolError(f"node {member.node_id!r} sent a {message.TYPE} that is not its to send")

    async def _peer_lost(self, hop: Hop, reason: str) -> None:
        """A link between two hops ends with either of them: the route's failure names the one that is gone."""
        with trio.move_on_after(VERDICT_SECONDS):
            await self.broken.wait()
        self.fail(hop.failed(f"the link of node {hop.member.node_id!r} to a neighbour was lost", reason))

    def _register(self, batch: Run) -> tuple[str, Ticket]:
        request_id = format(next(self._ids), "x")
        ticket = Ticket(batch.segments, batch.hidden.width, batch.hidden.dtype)
        self._in_flight[request_id] = ticket
        return request_id, ticket

    def _stalled(self, how: str) -> RouteError:
        if len(self.hops) == 1:
            [hop] = self.hops
            hop.member.fail(f"it gave no answer {how}")
            return hop.failed(f"node {hop.member.node_id!r} gave no answer", how)
        nodes = ", ".join(f"{hop.member.node_id!r} {hop.span}" for hop in self.hops)
        return RouteError("the route gave no answer", f"{how}; {self.in_flight} were in flight in {nodes}")

    async def _enter(self, batch: Run, request_id: str) -> None:
        first = self.hops[0]
        try:
            with self._until_broken():
                await first.member.link.send(batch, request_id)
        except ChannelClosed as error:
            self.fail(first.lost(error.reason))
        except trio.Cancelled:
            self._in_flight.pop(request_id, None)
            raise

    @contextmanager
    def _until_broken(self) -> Iterator[None]:
        """The block is cut short when the route breaks: its first hop may take nothing then."""
        with trio.CancelScope() as scope:
            self._entering.add(scope)
            try:
                yield
            finally:
                self._entering.discard(scope)

    async def _relay_batch(self, place: int, packet: Packet, batch: Run) -> None:
        """To the hop at `place`, once. One that nobody waits for goes nowhere."""
        ticket, sender = self._in_flight.get(packet.request_id), self.hops[place - 1]
        if ticket is None:
            return
        if ticket.reached >= place or batch.segments != ticket.segments:
            raise ProtocolError(f"node {sender.member.node_id!r} sent a {batch.TYPE} that is not the one it was given")
        if wanted := ticket.unlike(batch.hidden, answers=False):
            self._answered(packet)
            ticket.fail(_misshapen(sender, batch.hidden, wanted))
            return
        ticket.reached = place
        await self._relay(self.hops[place], packet)

    async def _relay_command(self, hop: Hop, packet: Packet, command: CacheCommand) -> None:
        """The very one that was given to the hop before: sessions are the coordinator's to copy and to clear."""
        owed = self._to_relay[hop.number]
        if not owed or command != msgspec.structs.replace(owed.popleft(), hop=hop.number):
            raise ProtocolError(f"a {command.TYPE} came for the hop {hop.number} that nobody was given")
        await self._relay(hop, packet)

    async def _relay(self, hop: Hop, packet: Packet) -> None:
        try:
            await hop.member.link.send(packet.message, packet.request_id)
        except ChannelClosed as error:
            self.fail(hop.lost(error.reason))

    def _answered(self, packet: Packet) -> Ticket | None:
        """The batch that is answered. It overtakes those before it unless it failed; those behind have their turn."""
        ticket, now = self._in_flight.get(packet.request_id), trio.current_time()
        if ticket is None:
            return None
        in_flight = list(self._in_flight.values())
        place = in_flight.index(ticket)
        for behind in in_flight[place + 1 :]:
            behind.patience.deadline = now + STALL_SECONDS
        for before in in_flight[:place] if isinstance(packet.message, HiddenState) else ():
            before.is_overtaken = True
            before.patience.deadline = min(before.patience.deadline, now + SKIPPED_SECONDS)
        return self._in_flight.pop(packet.request_id)


def _longest(hops: Sequence[Hop], nbytes: int) -> int:
    return longest_session(lambda tokens: sum(hop.session_cost(tokens) for hop in hops), nbytes)


def _room_of(hops: Sequence[Hop], route: Sequence[Hop]) -> int:
    """Bytes of KV memory that the member of `hops` has, beside what other routes use of it."""
    member = hops[0].member
    return max(0, member.kv_room - sum(hop.kv_bytes for hop in member.hops if hop not in route))


def _misshapen(hop: Hop, hidden: Tensor, wanted: str) -> WrongAnswer:
    node_id, shape = hop.member.node_id, f"{hidden.rows} x {hidden.width} in {clipped(hidden.dtype)[:64]}"
    return WrongAnswer(f"node {node_id!r} made hidden states of {shape}", f"not {wanted}", node=node_id)


def _stage_error(hop: Hop, message: InferenceError) -> StageError:
    kind, node_id = NoKVRoom if message.no_room else StageError, hop.member.node_id
    return kind(f"node {node_id!r} failed on layers {hop.span}", message.message, node=node_id)
