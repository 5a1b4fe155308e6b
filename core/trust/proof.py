"""How one end of an encrypted connection proves its identity to the other.

The dialler knows the listener by the certificate that TLS showed it. The listener sends a nonce, and the dialler signs
it together with the listener's fingerprint and what it comes as: so a listener can't pass the proof on to another one.
"""

from __future__ import annotations

import secrets
from hashlib import sha256
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from core.errors import TrustError
from core.trust.identity import Identity

NONCE_BYTES = 32
Role = Literal["node", "peer"]


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def signature(identity: Identity, role: Role, nonce: bytes, listener: bytes) -> bytes:
    """ECDSA over SHA-256, in DER. `listener` is the fingerprint of who gets it."""
    return identity.sign(_signed(role, nonce, listener))


def verified(role: Role, certificate: bytes | None, signature: bytes | None, nonce: bytes, listener: bytes) -> bytes:
    """The dialler's fingerprint. Raises TrustError where it does not hold the key of its certificate (DER)."""
    try:
        if certificate is None or signature is None:
            raise ValueError("there is none")
        key = x509.load_der_x509_certificate(certificate).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("its key is of another kind")
        key.verify(signature, _signed(role, nonce, listener), ec.ECDSA(SHA256()))
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise TrustError("the proof of identity does not hold", str(error) or "the signature is wrong") from None
    return sha256(certificate).digest()


def _signed(role: Role, nonce: bytes, listener: bytes) -> bytes:
    return b"core handshake 1\0" + role.encode() + b"\0" + nonce + listener
