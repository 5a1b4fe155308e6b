"""A hop: a member's part in one route, or what it holds to stand in for another's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import trio

from core.errors import ChannelClosed, RouteError
from core.protocol.messages import LoadComplete, LoadFailed, LoadProgress, Message, PeerConnected

if TYPE_CHECKING:
    from core.coordinator.members import Member
    from core.runtime.model import Precision

DIRECT = "direct"
"""What a hop's link is called that needs no relay."""
_MAILBOX = 256
Answer = LoadProgress | LoadComplete | LoadFailed | PeerConnected
AnswerT = TypeVar("AnswerT", bound=Message)


class HopState(Enum):
    LOADING = "loading"
    LOADED = "loaded"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Hop:
    """A member's part in one route: its layers, and what is true of them there. A member may have several.

    `number` is the hop's own, for as long as the coordinator lives. `precision` is how its layers are packed and
    computed. `weight_bytes` are known once it has loaded; `session_cost` is what a session's caches take there, in
    bytes, by the tokens that they have room for. `link` says how its upstream neighbour reaches it: direct, or relayed
    with the reason; "" if it has none.
    """

    number: int
    member: Member
    layers: range
    precision: Precision
    session_cost: Callable[[int], int] = lambda tokens: 0
    state: HopState = HopState.LOADING
    weight_bytes: int = 0
    planned_seconds: float = 0.0
    """What a row was to take in its layers when the plan was made; 0 if its member had not timed such layers then."""
    link: str = ""
    stands_in: bool = False
    """It has no route: its member has the layers at hand for one."""
    kv_used: Callable[[], Mapping[int, int]] = dict
    """How many sessions have caches there, reserved or kept, by the tokens that they have room for."""
    _mail: trio.MemorySendChannel[Answer] = field(init=False)
    _mailbox: trio.MemoryReceiveChannel[Answer] = field(init=False)

    def __post_init__(self) -> None:
        self._mail, self._mailbox = trio.open_memory_channel[Answer](_MAILBOX)

    @property
    def span(self) -> str:
        """Its layers, for people."""
        return f"[{self.layers.start}, {self.layers.stop})"

    @property
    def kv_bytes(self) -> int:
        """Of KV memory that is reserved or kept on it."""
        return self.cache_bytes(self.kv_used())

    def cache_bytes(self, rooms: Mapping[int, int]) -> int:
        """Of the caches of some sessions: how many there are by the tokens that they have room for."""
        return sum(count * self.session_cost(tokens) for tokens, count in rooms.items())

    def post(self, answer: Answer) -> None:
        """Hands an answer to whoever builds the route; old ones make room for new ones."""
        try:
            self._mail.send_nowait(answer)
        except trio.WouldBlock:
            self._mailbox.receive_nowait()
            self._mail.send_nowait(answer)
        except trio.ClosedResourceError:
            return

    def close(self) -> None:
        """Nobody answers for it from now on."""
        self._mail.close()

    async def send(self, message: Message) -> None:
        """To the hop's member. Raises RouteError if that is gone."""
        try:
            await self.member.link.send(message)
        except ChannelClosed as error:
            raise self.lost(error.reason) from None

    async def answer(self, *kinds: type[AnswerT], within: float) -> AnswerT:
        """The next answer that is of these kinds.

        Raises RouteError if the member goes, or fails by giving none in time.
        """
        try:
            with trio.fail_after(within):
                async for answer in self._mailbox:
                    if isinstance(answer, kinds):
                        return answer
        except trio.TooSlowError:
            silence = self.lost(f"no answer within {within:g} s")
            if not self.stands_in:
                self.member.fail(silence.message)
            raise silence from None
        raise self.lost(self.member.gone_because)

    def lost(self, reason: str) -> RouteError:
        """What a session is told whose route broke because the member is gone."""
        return self.failed(f"node {self.member.node_id!r} was lost", reason)

    def failed(self, title: str, reason: str) -> RouteError:
        """A route's end that is this hop's doing."""
        return RouteError(f"{title} with layers {self.span}", reason, node=self.member.node_id, layers=self.span)
