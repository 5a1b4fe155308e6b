"""Whatever frames a peer sends, in whatever order, also to an end that is closing: messages, or a Goodbye."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from core_plugin_tcp.framing import LengthPrefixed
from core_plugin_websocket.framing import Frames
from hypothesis import given, settings
from hypothesis import strategies as some

from core.tcp import Frames as AnyFrames
from core.tcp import Goodbye

LIMIT = 1000
MAKERS: dict[str, Callable[[], AnyFrames]] = {
    "a websocket's client": lambda: Frames(b"", client=True, limit=LIMIT, on_ping=lambda _: None),
    "a websocket's server": lambda: Frames(b"", client=False, limit=LIMIT, on_ping=lambda _: None),
    "tcp": lambda: LengthPrefixed(b"", LIMIT),
}
CLOSING = b"closing"
"""Not sent: this end says goodbye."""


def websocket_frame(first: int, masked: bool, payload: bytes) -> bytes:
    return bytes([first, masked << 7 | len(payload)]) + (bytes(4) if masked else b"") + payload


frames = some.builds(
    websocket_frame,
    some.sampled_from([0x82, 0x02, 0x00, 0x80, 0x81, 0x88, 0x89, 0x8A, 0x09, 0x8B, 0xC2]),
    some.booleans(),
    some.sampled_from([b"", b"x", b"\x03\xe8", b"\x03\xe8bye", b"\xff\xff", b"\x03\xe8\xff", bytes(125)]),
)
lengths = some.sampled_from(
    [bytes(4), b"\x00\x00\x00\x02ok", b"\x00\x00\x04\x00", b"\xff\xff\xff\xff", b"\xff\xff\xff\xfe"]
)
hostile = some.lists(frames | lengths | some.binary(max_size=20) | some.just(CLOSING), max_size=12)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(sent=hostile)
def test_nothing_but_messages_and_goodbyes_comes_of_any_frames(kind: str, sent: Sequence[bytes]) -> None:
    end = MAKERS[kind]()
    for piece in sent:
        if piece is CLOSING:
            end.goodbye()
            continue
        end.feed(piece)
        try:
            while (message := end.next_message()) is not None:
                assert len(message) <= LIMIT
        except Goodbye as goodbye:
            assert isinstance(goodbye.answer, bytes)
            assert goodbye.why
