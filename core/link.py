"""A link: moves messages between two parties over a transport's channel, and notices when the other is gone."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from core.errors import ChannelClosed, CoreError, ProtocolError, TrustError, sole_error
from core.guard import raised
from core.interfaces.transport import GREETING_BYTES, Channel
from core.protocol.codec import MAX_TENSOR_BYTES, Decoder, Packet, encode, encode_whole, fits_one_frame
from core.protocol.fields import clipped
from core.protocol.messages import Challenge, Error, ErrorCode, Message, Ping, Pong
from core.trust.addresses import host_of, is_loopback
from core.trust.proof import new_nonce

HEARTBEAT_SECONDS = 1.0
PATIENCE_SECONDS = 3.0
"""Without a single frame for this long, the peer is held to be gone."""
WRITE_SECONDS = 30.0
"""What a slow network may take for one frame; a peer that takes none for this long is given up."""
HANDSHAKE_SECONDS = 5.0
_QUEUE = 256
_ROUND_TRIPS, _FEW = 16, 3
PROBES, PROBE_BYTES = 4, 64 * 1024
"""Heartbeats that carry so much, to see how much longer they take: once, after the first few, one at the other's heels
so that TCP has seen by the last what the network takes."""
_NOISE_SECONDS = 1e-4
"""What two heartbeats differ by anyhow."""
_FLUSH_SECONDS = 1.0
_HELD_UP_SECONDS = 0.25
"""A task that runs so much later than it should: its process, or its machine, was held up."""


class Link:
    """Made by `open_link`. Any task may send; one task receives, and must keep at it: it never computes."""

    def __init__(self, channel: Channel, patience: float) -> None:
        self.peer = channel.peer
        self.local_host = channel.local_host
        self.secure = channel.secure
        self.within_this_machine = is_loopback(host_of(channel.peer)) or host_of(channel.peer) == channel.local_host
        """No other machine has an address of this one's."""
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS)
        self._probed: deque[float] = deque(maxlen=PROBES)
        self._probes = 0
        """How many are to be sent."""
        self._asked: dict[int, trio.Event] = {}
        """By when a heartbeat was sent: set when it is answered."""
        self.measured = trio.Event()
        """Set once `round_trip` and `bandwidth` are known, on the end that was dialled."""
        self._channel = channel
        self._patience = patience
        self._decoder = Decoder()
        self._seq = itertools.count(1)
        self._turn = threading.Lock()
        """Held while a message is written: its frames follow each other, whichever thread writes."""
        self._outgoing, self._queue = trio.open_memory_channel[list[bytes]](_QUEUE)
        self._unwritten = 0
        """Messages that are queued or being written."""
        self._written = trio.Event()
        self._waiting_since = math.inf
        """When the receiver began to wait for a frame; infinity while it doesn't wait."""
        self._silent = False

    @property
    def round_trip(self) -> float | None:
        """The shortest of the last heartbeats', in seconds: what a busy machine adds says nothing of the network.

        None before the first few.
        """
        return min(self._round_trips) if len(self._round_trips) >= _FEW else None

    @property
    def typical_round_trip(self) -> float | None:
        """The median of the last heartbeats', in seconds: what a message has to expect, busy machines included."""
        return statistics.median(self._round_trips) if len(self._round_trips) >= _FEW else None

    @property
    def bandwidth(self) -> float:
        """Bytes per second, the same both ways: what both together take. 0 if it is not known, or too much to tell."""
        if self.round_trip is None or not self._probed:
            return 0.0
        longer = min(self._probed) - self.round_trip
        return 2 * PROBE_BYTES / longer if longer > _NOISE_SECONDS else 0.0

    async def send(self, message: Message, request_id: str = "") -> None:
        """Queues a message, waiting while the queue is full. Raises ChannelClosed after the link ended."""
        frames = encode(self._packet(message, request_id))
        self._unwritten += 1
        try:
            await self._outgoing.send(frames)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise ChannelClosed(f"the link to {self.peer} has ended") from None
        except trio.Cancelled:
            self._unwritten -= 1
            raise

    def send_now(self, message: Message, request_id: str = "") -> bool:
        """Sends a small message past the event loop, from any thread. False: nothing was sent, and `send` is to.

        It waits for nothing, so it gives way to whatever is queued or being written.
        """
        if not fits_one_frame(message) or not self._turn.acquire(blocking=False):
            return False
        try:
            if self._unwritten:
                return False
            return self._channel.send_now(encode_whole(self._packet(message, request_id)))
        finally:
            self._turn.release()

    async def end_with(self, message: Message) -> None:
        """Sends a last message and waits, for a second at most, until it is written; nothing can be sent after it."""
        with trio.move_on_after(_FLUSH_SECONDS):
            await self.send(message)
        await self._flush()

    async def _flush(self) -> None:
        self._outgoing.close()
        with trio.move_on_after(_FLUSH_SECONDS):
            await self._written.wait()

    async def receive(self) -> Packet:
        """The next message; heartbeats are answered here. Raises ChannelClosed, or ProtocolError for nonsense."""
        while True:
            packet = self._decoder.feed(await self._frame())
            if packet is None:
                continue
            if isinstance(packet.message, Ping):
                self.try_send(Pong(packet.message.sent_us, packet.message.padding))
            elif isinstance(packet.message, Pong):
                self._note(packet.message)
            else:
                return packet

    async def answers(self) -> bool:
        """Whether the peer answers now, before it would be held to be gone. Another task receives meanwhile."""
        sent, answered = _now_us(), trio.Event()
        self._asked[sent] = answered
        try:
            with trio.move_on_after(self._patience):
                await self.send(Ping(sent))
                await answered.wait()
        except ChannelClosed:
            return False
        finally:
            del self._asked[sent]
        return answered.is_set()

    def _note(self, pong: Pong) -> None:
        if pong.sent_us in self._asked:
            self._asked[pong.sent_us].set()
        seconds = max(0, _now_us() - pong.sent_us) / 1e6
        if len(pong.padding) == PROBE_BYTES:
            self._probed.append(seconds)
            if self._probes > 0:
                self._probe()
            else:
                self.measured.set()
        else:
            self._round_trips.append(seconds)

    def limit(self, nbytes: int) -> None:
        """From now on `receive` raises ProtocolError for a larger frame or tensor."""
        self._decoder.limit = nbytes

    def settle(self) -> None:
        """The peer has proven who it is: it may send whatever the protocol has room for."""
        self.limit(MAX_TENSOR_BYTES)
        self._channel.settled()
        self._probes = PROBES

    async def _frame(self) -> bytes:
        self._waiting_since = trio.current_time()
        try:
            return await self._channel.receive()
        except ChannelClosed:
            if self._silent:
                raise ChannelClosed(f"{self.peer} has been silent for {self._patience:g} s") from None
            raise
        except CoreError:
            raise
        except Exception as error:
            raise self._broken_by("receive", error) from error
        finally:
            self._waiting_since = math.inf

    def _packet(self, message: Message, request_id: str = "") -> Packet:
        return Packet(message, request_id, next(self._seq))

    def try_send(self, message: Message) -> bool:
        """Queues a message, and says whether it did: it does not while the queue is full, or after the link ended.

        A heartbeat is not needed then: while the queue is full, other frames are on their way.
        """
        try:
            self._outgoing.send_nowait(encode(self._packet(message)))
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        self._unwritten += 1
        return True

    async def _write(self) -> None:
        """The only task that sends on the channel. When it fails the channel is closed, which wakes the receiver."""
        try:
            async with self._queue:
                async for frames in self._queue:
                    await self._write_message(frames)
                    self._unwritten -= 1
        except ChannelClosed:
            await self._channel.aclose()
        finally:
            self._written.set()

    async def _write_message(self, frames: list[bytes]) -> None:
        while not self._turn.acquire(blocking=False):
            await trio.lowlevel.checkpoint()
        try:
            for frame in frames:
                with trio.move_on_after(WRITE_SECONDS) as late:
                    await self._send_frame(frame)
                if late.cancelled_caught:
                    raise ChannelClosed(f"{self.peer} has taken nothing for {WRITE_SECONDS:g} s")
        finally:
            self._turn.release()

    async def _send_frame(self, frame: bytes) -> None:
        try:
            await self._channel.send(frame)
        except CoreError:
            raise
        except Exception as error:
            raise self._broken_by("send", error) from error

    def _broken_by(self, method: str, error: Exception) -> ChannelClosed:
        """What a transport's mistake does to the link, and to nothing else."""
        kind = type(self._channel)
        whose = f"{kind.__module__}.{kind.__qualname__}.{method}"
        return ChannelClosed(f"the link to {self.peer} broke", f"{whose} {raised(error)}")

    async def _watch(self) -> None:
        """Wakes a receiver that has waited for too long: a deadline for every frame would cost each of them more."""
        while (waited := trio.current_time() - self._waiting_since) < self._patience:
            due = trio.current_time() + self._patience - max(waited, 0)
            await trio.sleep_until(due)
            if trio.current_time() - due > _HELD_UP_SECONDS:
                # What came while this process itself stood still is read first.
                self._waiting_since = max(self._waiting_since, trio.current_time() - self._patience + _FLUSH_SECONDS)
        self._silent = True
        with trio.CancelScope() as at_once:
            at_once.cancel()
            await self._channel.aclose()

    async def _beat(self, interval: float) -> None:
        while True:
            if self._probes == PROBES and self.round_trip is not None:
                self._probe()
            else:
                self.try_send(Ping(_now_us()))
            await trio.sleep(interval)

    def _probe(self) -> None:
        self._probes -= self.try_send(Ping(_now_us(), bytes(PROBE_BYTES)))


def _now_us() -> int:
    return time.monotonic_ns() // 1000


@asynccontextmanager
async def open_link(
    channel: Channel, *, heartbeat: float = HEARTBEAT_SECONDS, patience: float = PATIENCE_SECONDS
) -> AsyncIterator[Link]:
    """A link for the length of the block. What was sent before a normal end is still written, within a second."""
    link = Link(channel, patience)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link._write)
            nursery.start_soon(link._beat, heartbeat)
            nursery.start_soon(link._watch)
            try:
                yield link
                await link._flush()
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise sole_error(group) from None


async def first_message(link: Link) -> Message:
    """A handshake's next message. Raises ChannelClosed where it doesn't come in time."""
    try:
        with trio.fail_after(HANDSHAKE_SECONDS):
            return (await link.receive()).message
    except trio.TooSlowError:
        raise ChannelClosed(f"{link.peer} did not say who it is within {HANDSHAKE_SECONDS:g} s") from None


async def greeting(link: Link) -> tuple[Message, bytes]:
    """What a peer that came says first, and the nonce that it was asked to sign, where the link is encrypted.

    The link takes small messages alone until it is settled.

    Raises ChannelClosed where it says nothing; ProtocolError, after telling it why, for nonsense, or for more than a
    greeting needs; TrustError, before anything is read, where a link from another machine is not encrypted.
    """
    nonce = new_nonce()
    link.limit(GREETING_BYTES)
    try:
        if link.secure:
            await link.send(Challenge(nonce))
        elif not link.within_this_machine:
            raise TrustError("a link that is not encrypted was refused", "beyond one machine an invite is needed")
        return await first_message(link), nonce
    except (ProtocolError, TrustError) as error:
        await link.end_with(Error(ErrorCode.PROTOCOL, clipped(error)))
        raise
