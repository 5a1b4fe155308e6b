"""How one end of an encrypted connection proves its identity to the other.

The dialler knows the listener by the certificate that TLS showed it. The listener sends a nonce, and the dialler signs
it together with the listener's fingerprint and what it comes as: so a listener can't pass the proof on to another one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from core.errors import TrustError
from core.trust.identity import Identity

NONCE_BYTES = 32
Role = Literal["node", "peer"]


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Proof:
    """The dialler's certificate (DER), and its ECDSA signature (DER, over SHA-256)."""

    certificate: bytes
    signature: bytes

    @classmethod
    def of(cls, identity: Identity, role: Role, nonce: bytes, listener: bytes) -> Proof:
        """`listener` is the fingerprint of who gets this."""
        return cls(identity.certificate, identity.sign(_signed(role, nonce, listener)))

    def verified(self, role: Role, nonce: bytes, listener: bytes) -> bytes:
        """The dialler's fingerprint. Raises TrustError where it does not hold the certificate's key."""
        try:
            key = x509.load_der_x509_certificate(self.certificate).public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError("its key is of another kind")
            key.verify(self.signature, _signed(role, nonce, listener), ec.ECDSA(SHA256()))
        except (ValueError, TypeError, InvalidSignature, x509.InvalidVersion) as error:
            raise TrustError("the proof of identity does not hold", str(error) or "the signature is wrong") from None
        return sha256(self.certificate).digest()


def _signed(role: Role, nonce: bytes, listener: bytes) -> bytes:
    return b"core handshake 1\0" + role.encode() + b"\0" + nonce + listener
