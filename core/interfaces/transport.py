"""The seam for transports: channels that move whole messages of bytes between two machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, ClassVar

import trio

if TYPE_CHECKING:
    from ssl import SSLContext


DEFAULT_TRANSPORT = "trio-websocket"
"""What machines reach each other by if nobody says otherwise, and what an invite that names none stands for."""
MIN_MESSAGE_BYTES = 512 * 1024
"""Bytes that every transport moves in one message: core sends none that is larger."""
GREETING_BYTES = 64 * 1024
"""The largest message that is taken from a peer before it has proven who it is."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a listener shows to those who dial it: a TLS 1.3 server context, and the certificate in it as DER."""

    certificate: bytes
    context: SSLContext

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate: how a dialler knows the listener."""
        return sha256(self.certificate).digest()


class Channel(ABC):
    """Moves messages of at most `Transport.max_message` bytes, in order. One task sends, one task receives.

    A send that is cancelled midway leaves the channel unusable. After the connection ended, for whatever reason,
    both raise ChannelClosed.
    """

    peer: str
    """The other end's address, as shown to people: host:port."""

    local_host: str
    """This end's own address."""

    secure: bool = False
    """Whether TLS protects it, to a listener that showed the certificate which the dialler expected."""

    @abstractmethod
    async def send(self, data: bytes) -> None: ...

    def send_now(self, data: bytes) -> bool:
        """Sends without the event loop, from any thread, while no `send` is under way. False: nothing was sent.

        A channel that can't, or a message that it would have to wait for, goes by `send`; so this may stay as it is.
        """
        return False

    @abstractmethod
    async def receive(self) -> bytes: ...

    def settled(self) -> None:
        """Called once the peer has proven who it is: until then a listener may count the connection as half open, and
        refuse a message larger than `GREETING_BYTES` by its header, before it has come."""
        return

    @abstractmethod
    async def aclose(self) -> None:
        """Closes within two seconds, whatever the peer does; at once where it is cancelled.

        A peer that goes on receiving gets what was sent before, and then ChannelClosed.
        """


Handler = Callable[[Channel], Awaitable[None]]


class Transport(ABC):
    name: ClassVar[str]
    max_message: ClassVar[int]
    """The largest message in bytes that a channel takes, `MIN_MESSAGE_BYTES` or more; a peer that sends a larger one is
    cut off."""

    @abstractmethod
    async def listen(
        self,
        host: str,
        port: int,
        handler: Handler,
        *,
        credentials: Credentials | None = None,
        task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serves until cancelled: each connection runs `handler` in a task of its own and is closed after it.

        Reports the port it listens on through `task_status`. Raises ConfigError where the port can't be had. A peer
        that is no peer, and a handler that raises, end their own connection and no other.

        With `credentials` it takes both those who dial with a `pin`, by TLS 1.3, and those who dial without: which of
        them may come in is the handler's to say.
        """

    @abstractmethod
    def dial(
        self, host: str, port: int, *, timeout: float, pin: bytes | None = None
    ) -> AbstractAsyncContextManager[Channel]:
        """Connects within `timeout` seconds, or raises ChannelClosed saying why not.

        `pin` asks for TLS 1.3 to a listener whose certificate has this SHA-256: TrustError where it has another,
        before anything is sent over it. Nobody vouches for the certificate, and no name is looked at.
        """
