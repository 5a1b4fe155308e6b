"""What websockets say when they fail, in words for people."""

from __future__ import annotations

import trio_websocket

from core import ChannelClosed
from core.tcp import CHECK_PORT, CLOSED, closed

_ABNORMAL = 1006
_NORMAL = 1000


def ended(peer: str, reason: trio_websocket.CloseReason | None) -> ChannelClosed:
    """Why a websocket that once stood is no more. Without a reason it broke off."""
    return closed(peer, None if reason is None or reason.code == _ABNORMAL else in_words(reason))


def in_words(reason: trio_websocket.CloseReason) -> str:
    if reason.code == _NORMAL:
        return CLOSED
    return f"it was closed with code {reason.code} {reason.name}, {reason.reason!r}"


def handshake_failed(peer: str, ended: bool, failure: Exception | None) -> ChannelClosed:
    """Why a TCP connection did not become a websocket."""
    title = f"no websocket with {peer}"
    if not ended:
        return ChannelClosed(title, "it was connected, but did not finish the handshake in time", CHECK_PORT)
    if isinstance(failure, trio_websocket.ConnectionRejected):
        return ChannelClosed(title, f"it answered with HTTP status {failure.status_code} instead of one", CHECK_PORT)
    if failure is not None:
        return ChannelClosed(title, "it does not speak the websocket protocol", CHECK_PORT)
    return ChannelClosed(title, "it closed the connection during the handshake", CHECK_PORT)


def from_a_browser(peer: str) -> ChannelClosed:
    return ChannelClosed(f"no websocket with {peer}", "a web page asked for it, in a browser")
