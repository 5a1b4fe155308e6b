"""The code that both machines show while one of them asks the other to let it join.

Two people compare it, so it is short; and a machine in between, with a key of its own towards either, must not be able
to choose keys or nonces until both codes are alike. So the dialler commits to its nonce before it sees the listener's,
and reveals it afterwards, as in Bluetooth's numeric comparison (Core Specification 5.4, vol. 2 H, 7.2.1): whoever is in
between learns the one code when it can't change the other any more, and has a chance of one in a million.
"""

from __future__ import annotations

from hashlib import sha256

ASK_SECONDS = 600.0
"""How long a host has to answer."""
DIGITS = 6


def commitment(nonce: bytes) -> bytes:
    """SHA-256. `nonce` has 32 random bytes, so nobody finds it from this."""
    return sha256(b"core asking 1 commitment\0" + nonce).digest()


def code(listener: bytes, dialler: bytes, listener_nonce: bytes, dialler_nonce: bytes) -> str:
    """Six digits. `listener` and `dialler` are the fingerprints of their certificates; all have 32 bytes."""
    digest = sha256(b"core asking 1 code\0" + listener + dialler + listener_nonce + dialler_nonce).digest()
    return f"{int.from_bytes(digest) % 10**DIGITS:0{DIGITS}}"
