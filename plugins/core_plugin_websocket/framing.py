"""One websocket frame that is a whole binary message (RFC 6455, section 5.2)."""

from __future__ import annotations

import os
import struct

from core_plugin_websocket.masking import NumpyXorMasker

_FINAL_BINARY = 0x82
_MASKED = 0x80
_KEY_BYTES = 4


def binary_frame(data: bytes, *, masked: bool) -> bytes:
    """Masked is what a client sends."""
    bit = _MASKED if masked else 0
    if len(data) < 126:
        head = struct.pack("!BB", _FINAL_BINARY, bit | len(data))
    elif len(data) < 1 << 16:
        head = struct.pack("!BBH", _FINAL_BINARY, bit | 126, len(data))
    else:
        head = struct.pack("!BBQ", _FINAL_BINARY, bit | 127, len(data))
    if not masked:
        return head + data
    key = os.urandom(_KEY_BYTES)
    return head + key + NumpyXorMasker(key).process(data)
