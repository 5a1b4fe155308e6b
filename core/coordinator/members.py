"""Who has joined: each member's link, what it offered, and what it is doing."""

from __future__ import annotations

from hashlib import sha256
from typing import TypeVar

import trio

from core.errors import ChannelClosed, RouteError
from core.link import Link
from core.protocol.messages import (
    Error,
    Hello,
    LoadComplete,
    LoadFailed,
    LoadProgress,
    Message,
    NodeState,
    PeerConnected,
)
from core.trust.register import KnownNode

_MAILBOX = 256
Answer = LoadProgress | LoadComplete | LoadFailed | PeerConnected
AnswerT = TypeVar("AnswerT", bound=Message)


class Member:
    """One node for the length of one connection. `scope` is its handler's: cancelling it ends the connection."""

    def __init__(self, hello: Hello, link: Link, credential: KnownNode | None = None) -> None:
        self.node_id = credential.node_id if credential else hello.node_id
        self.hello = hello
        self.link = link
        self.credential = credential
        """What the register has on it; None for a node that came over loopback."""
        self.fingerprint = sha256(hello.certificate).digest() if hello.certificate else None
        """Of the certificate that its neighbours will be shown."""
        self.scope = trio.CancelScope()
        self.state = "idle"
        self.detail = ""
        self.paused = hello.paused
        """Why it takes no layers for now; "" where it does."""
        self.leaves = False
        """It is paused because it is about to end."""
        self.excused = False
        """It is paused, and nobody is served by it any more."""
        self.progress: tuple[int, int] | None = None
        self.layers: range | None = None
        self.weight_bytes = 0
        self.kv_tokens = 0
        """Of KV cache: what its memory holds beside its layers."""
        self.upstream_link = ""
        """How its upstream neighbour reaches it: direct, or relayed with the reason; "" where it has none."""
        self.reported = NodeState(0, 0, 0, hello.free_memory)
        self.failed_at: float | None = None
        self.gone_because = ""
        self.farewell: Error | None = None
        """What it is told at the end, where it was dismissed."""
        self._mail, self._mailbox = trio.open_memory_channel[Answer](_MAILBOX)

    def become(self, state: str, detail: str = "") -> None:
        self.state, self.detail, self.progress = state, detail, None

    def rest(self) -> None:
        """It has no part in a route."""
        if self.paused:
            self.become("paused", f"it {self.absence}: {self.paused}")
            self.layers, self.weight_bytes = None, 0
        elif self.state != "failed":
            self.become("idle")

    @property
    def absence(self) -> str:
        return "left" if self.leaves else "is paused"

    def pause(self, reason: str, *, leaves: bool = False) -> None:
        """Or ends the pause, where there is no reason."""
        self.paused, self.leaves, self.excused = reason, leaves, self.excused and reason != ""

    def fail(self, reason: str) -> None:
        """It is left out of the next plans for a while."""
        self.become("failed", reason)
        self.layers, self.failed_at = None, trio.current_time()

    def post(self, answer: Answer) -> None:
        """Hands an answer to whoever builds a route with this member; old ones make room for new ones."""
        if self.gone_because:
            return
        try:
            self._mail.send_nowait(answer)
        except trio.WouldBlock:
            self._mailbox.receive_nowait()
            self._mail.send_nowait(answer)

    async def answer(self, epoch: int, *kinds: type[AnswerT], within: float) -> AnswerT:
        """The next answer of `epoch` that is of these kinds.

        Raises RouteError where the member goes, or fails by giving none in time.
        """
        try:
            with trio.fail_after(within):
                async for answer in self._mailbox:
                    if answer.epoch == epoch and isinstance(answer, kinds):
                        return answer
        except trio.TooSlowError:
            silence = self.lost(f"no answer within {within:g} s")
            self.fail(silence.message)
            raise silence from None
        raise self.lost(self.gone_because)

    def dismiss(self, farewell: Error) -> None:
        """Ends its connection, telling it why."""
        self.leave(farewell.message)
        self.farewell = farewell
        self.scope.cancel()

    def leave(self, reason: str) -> None:
        self.gone_because = reason
        self._mail.close()

    def lost(self, reason: str) -> RouteError:
        """What a session is told whose route broke because this member is gone."""
        return self._failure("node {} was lost", reason)

    def cut_off(self, reason: str) -> RouteError:
        """What a session is told whose route broke between this member and a neighbour, both of which are there."""
        return self._failure("the link of node {} to a neighbour was lost", reason)

    def _failure(self, title: str, reason: str) -> RouteError:
        layers = f"[{self.layers.start}, {self.layers.stop})" if self.layers is not None else ""
        return RouteError(
            title.format(repr(self.node_id)) + (f" with layers {layers}" if layers else ""),
            reason,
            node=self.node_id,
            layers=layers,
        )


class Members:
    """The members by id, in the order in which they joined."""

    def __init__(self) -> None:
        self._by_id: dict[str, Member] = {}
        self._changed = trio.Event()

    def all(self) -> list[Member]:
        return list(self._by_id.values())

    def add(self, member: Member) -> None:
        """A node that joins again, before its old connection was noticed to be dead, takes the old one's place."""
        old = self._by_id.pop(member.node_id, None)
        if old is not None:
            old.dismiss(Error("replaced", f"a node joined later as {old.node_id!r}"))
        self._by_id[member.node_id] = member
        self.notify()

    def remove(self, member: Member, reason: str) -> None:
        if self._by_id.get(member.node_id) is member:
            del self._by_id[member.node_id]
            member.leave(reason)
            self.notify()

    async def say_goodbye(self, message: Message) -> None:
        """The last message to each; whoever does not take it within a second goes without."""
        async with trio.open_nursery() as nursery:
            for member in self.all():
                nursery.start_soon(_end_with, member.link, message)

    def notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait_change(self) -> None:
        """Until someone joins, leaves or changes state. May be cut short by a deadline of the caller's."""
        await self._changed.wait()


async def _end_with(link: Link, message: Message) -> None:
    try:
        await link.end_with(message)
    except ChannelClosed:
        return
