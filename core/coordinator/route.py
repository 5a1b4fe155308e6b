"""A route: a plan that is loaded, linked and proven. Batches go in at the first hop and come out of the last."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from core.coordinator.members import Member
from core.errors import ChannelClosed, CoreError, ProtocolError, RouteError, StageError
from core.protocol.codec import Packet
from core.protocol.messages import CacheOrder, ClearCache, HiddenState, InferenceError, PeerLost, Run

STALL_SECONDS = 120.0
"""A route that has batches and finishes none for this long is given up."""
VERDICT_SECONDS = 1.5
"""Whoever died is seen to be gone from here as well, at once or a heartbeat later than from its neighbour."""


@dataclass(frozen=True, slots=True)
class Hop:
    member: Member
    layers: range


@dataclass(slots=True)
class Ticket:
    """A batch that is under way. `done` is set by what begins with its result, or when it fails.

    `seconds` is how long it took.
    """

    done: trio.Event = field(default_factory=trio.Event)
    result: HiddenState | None = None
    error: CoreError | None = None
    seconds: float = 0.0
    begin: Callable[[HiddenState], None] | None = None
    _sent: float = field(default_factory=time.perf_counter)

    def succeed(self, result: HiddenState) -> None:
        self.result, self.seconds = result, time.perf_counter() - self._sent
        if self.begin is not None:
            self.begin(result)

    def fail(self, error: CoreError) -> None:
        self.error = error
        self.done.set()


class Route:
    """The live chain of hops of one epoch. `broken` is set once, by `fail`; a broken route never recovers."""

    def __init__(self, epoch: int, hops: Sequence[Hop]) -> None:
        self.epoch = epoch
        self.hops = tuple(hops)
        self.broken = trio.Event()
        self.failure: RouteError | None = None
        self._under_way: dict[str, Ticket] = {}
        self._progressed_at = trio.current_time()
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
        self._under_way.pop(request_id, None)
        return None

    async def answer(self, ticket: Ticket, *, begin: Callable[[HiddenState], None]) -> HiddenState:
        """What came out of the last stage, once what `begin` does with it is done: that has `ticket.done` set.

        It begins as the answer comes, not when the waiting task has its turn.
        Raises RouteError where the route breaks meanwhile, and StageError where a stage refused or failed this
        batch; the route stands then.
        """
        ticket.begin, began = begin, trio.current_time()
        if ticket.result is not None:
            begin(ticket.result)
        while not ticket.done.is_set():
            with trio.move_on_at(max(began, self._progressed_at) + STALL_SECONDS):
                await ticket.done.wait()
            if trio.current_time() >= max(began, self._progressed_at) + STALL_SECONDS:
                self.fail(self._stalled())
        if ticket.error is not None:
            raise ticket.error
        assert ticket.result is not None
        return ticket.result

    @property
    def under_way(self) -> int:
        """Batches between the first hop and the last, also those for which nobody waits any more."""
        return len(self._under_way)

    @property
    def kv_tokens(self) -> int:
        """For how many tokens of KV cache every hop has memory."""
        return min(hop.member.kv_tokens for hop in self.hops)

    async def order(self, order: CacheOrder) -> None:
        """Has every hop do something with its caches, in turn with the batches. On a broken route it does nothing."""
        if self.failure is None:
            first = self.hops[0].member
            try:
                await first.link.send(order)
            except ChannelClosed as error:
                self.fail(first.lost(error.reason))

    def clear_broken(self) -> None:
        """Frees what the hops that are left still hold of a broken route's sessions."""
        for hop in self.hops:
            hop.member.link.try_send(ClearCache(self.epoch, []))

    def fail(self, failure: RouteError) -> None:
        """Ends the route: whoever waits for it, or asks it later, gets a RouteError like `failure`."""
        if self.failure is not None:
            return
        self.failure = failure
        for ticket in list(self._under_way.values()):
            ticket.fail(failure.again())
        self.broken.set()

    def member_left(self, member: Member) -> None:
        if any(hop.member is member for hop in self.hops):
            self.fail(member.lost(member.gone_because))

    async def take(self, member: Member, packet: Packet) -> None:
        """A message of this epoch from one of the hops. Raises ProtocolError where it isn't that hop's to send."""
        index = self._index(member)
        message = packet.message
        if isinstance(message, InferenceError):
            if (ticket := self._answered(packet)) is not None:
                ticket.fail(_stage_error(self.hops[index], message))
        elif isinstance(message, PeerLost):
            await self._peer_lost(member, message.reason)
        elif isinstance(message, HiddenState) and index == len(self.hops) - 1:
            if (ticket := self._answered(packet)) is not None:
                ticket.succeed(message)
        elif isinstance(message, (Run, CacheOrder)) and index < len(self.hops) - 1:
            await self._relay(self.hops[index + 1].member, packet)
        else:
            raise ProtocolError(f"node {member.node_id!r} sent a {message.TYPE} that is not its to send")

    async def _peer_lost(self, member: Member, reason: str) -> None:
        """A link between two hops ends with either of them: the route's failure names the one that is gone."""
        with trio.move_on_after(VERDICT_SECONDS):
            await self.broken.wait()
        self.fail(member.cut_off(reason))

    def _register(self, batch: Run) -> tuple[str, Ticket]:
        request_id, ticket = format(next(self._ids), "x"), Ticket()
        self._under_way[request_id] = ticket
        return request_id, ticket

    def _stalled(self) -> RouteError:
        nodes = ", ".join(f"{hop.member.node_id!r} [{hop.layers.start}, {hop.layers.stop})" for hop in self.hops)
        return RouteError(
            "the route gave no answer",
            f"none of {self.under_way} batches came out of {nodes} within {STALL_SECONDS:g} s",
        )

    async def _enter(self, batch: Run, request_id: str) -> None:
        first = self.hops[0].member
        try:
            await first.link.send(batch, request_id)
        except ChannelClosed as error:
            self.fail(first.lost(error.reason))
        except trio.Cancelled:
            self._under_way.pop(request_id, None)
            raise

    async def _relay(self, member: Member, packet: Packet) -> None:
        try:
            await member.link.send(packet.message, packet.request_id)
        except ChannelClosed as error:
            self.fail(member.lost(error.reason))

    def _answered(self, packet: Packet) -> Ticket | None:
        self._progressed_at = trio.current_time()
        return self._under_way.pop(packet.request_id, None)

    def _index(self, member: Member) -> int:
        for index, hop in enumerate(self.hops):
            if hop.member is member:
                return index
        raise ProtocolError(f"node {member.node_id!r} is not on route epoch {self.epoch}")


def _stage_error(hop: Hop, message: InferenceError) -> StageError:
    node_id, layers = hop.member.node_id, f"[{hop.layers.start}, {hop.layers.stop})"
    return StageError(f"node {node_id!r} failed on layers {layers}", message.message, node=node_id)
