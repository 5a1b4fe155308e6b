"""What people are shown of another machine's words can't steer their terminal."""

from __future__ import annotations

import msgpack
import pytest

from core.errors import ProtocolError
from core.protocol.codec import Decoder, Packet, encode
from core.protocol.fields import clipped
from core.protocol.messages import Leave

CONTROLS = ["\x1b]0;title\x07", "\x7f", "\x9b2J", "\0", "\u202e", "\u2066", "\u200f"]
LINES = ["\r", "\n", "\t", "\u2028", "\x85"]


@pytest.mark.parametrize("control", CONTROLS + LINES, ids=repr)
@pytest.mark.parametrize(
    ("kind", "payload"),
    [("LEAVE", {"reason": "bye{}"}), ("ERROR", {"code": "{}", "message": ""})],
    ids=["text", "name"],
)
def test_control_characters_are_refused(kind: str, payload: dict[str, str], control: str) -> None:
    filled = {name: value.format(control) for name, value in payload.items()}
    data = msgpack.packb({"type": kind, "request_id": "", "seq": 1, "payload": filled})
    with pytest.raises(ProtocolError, match=kind):
        Decoder().feed(data)


@pytest.mark.parametrize("control", CONTROLS, ids=repr)
def test_an_honest_text_is_sent_without_them(control: str) -> None:
    [frame] = encode(Packet(Leave(clipped(f"two\nlines{control}\tof torch's")), "", 1))
    packet = Decoder().feed(frame)
    assert packet is not None
    assert isinstance(packet.message, Leave)
    assert packet.message.reason.startswith("two lines\N{REPLACEMENT CHARACTER}")
    assert packet.message.reason.endswith(" of torch's")
