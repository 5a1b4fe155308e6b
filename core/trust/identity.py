"""A machine's identity: an ECDSA key on P-256 and a certificate that it signed itself, known by its SHA-256."""

from __future__ import annotations

import base64
import datetime
import logging
import re
import ssl
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from core.errors import ConfigError
from core.interfaces.transport import Credentials
from core.trust.machine import MachineMark
from core.trust.state_dir import StateDir

FILE = "identity.pem"
_COPIED = "identity-of-another-machine.pem"
_MACHINE = re.compile(rb"^machine: (\w*(?: \w+)*)$", re.MULTILINE)
_BEGINS = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NEVER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""RFC 5280, 4.1.2.5: a certificate without a well-defined end. Whoever pins it looks at its bytes, not its dates."""
NOWHERE = MachineMark()
"""That of a key without one, which may be anyone's."""
_log = logging.getLogger(__name__)


def short_id(fingerprint: bytes) -> str:
    """Eight letters and digits by which people tell keys apart."""
    return base64.b32encode(fingerprint[:5]).decode().lower()


@dataclass(frozen=True, slots=True)
class Identity:
    """`certificate` is DER (X.509), about 300 bytes."""

    certificate: bytes
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def fresh(cls) -> Identity:
        """One that nobody has seen. It lives as long as the process, unless it is written down."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "core")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_BEGINS)
            .not_valid_after(_NEVER)
            .sign(key, SHA256())
        )
        return cls(certificate.public_bytes(Encoding.DER), key)

    @classmethod
    def open(cls, state: StateDir) -> Identity:
        """The one that `state` holds, made when there is none yet.

        One that another machine made is set aside for a fresh one: two machines with one key would be taken for one.
        Raises ConfigError for a file that holds no identity.
        """
        here = MachineMark.here()
        with state.lock():
            data = state.read(FILE)
            made_on = _mark_of(data or b"")
            if data is not None and made_on.is_of_another_machine(here):
                _log.warning(
                    "the key in %s was made on another machine, whose disk was copied: this one gets its own, and"
                    " needs an invite of its own",
                    state.path,
                )
                state.write(_COPIED, data)
                data = None
            if data is None:
                data = cls.fresh().pem(here)
                state.write(FILE, data)
            elif not here.cards <= made_on.cards:
                data = cls.from_pem(data, state.path / FILE).pem(made_on.with_cards_of(here))
                state.write(FILE, data)
        return cls.from_pem(data, state.path / FILE)

    @classmethod
    def from_pem(cls, data: bytes, path: Path) -> Identity:
        try:
            key = load_pem_private_key(data, password=None)
            certificate = x509.load_pem_x509_certificate(data)
        except ValueError as error:
            raise ConfigError(
                f"{path} holds no key and certificate", str(error), "move it away to get a fresh identity"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"the key and the certificate in {path} don't belong together", "", "move it away")
        return cls(certificate.public_bytes(Encoding.DER), key)

    def pem(self, mark: MachineMark = NOWHERE) -> bytes:
        """Key and certificate (RFC 7468), and the mark of the machine that they are of."""
        key = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return f"machine: {mark}\n".encode() + key + ssl.DER_cert_to_PEM_cert(self.certificate).encode()

    @property
    def fingerprint(self) -> bytes:
        return sha256(self.certificate).digest()

    def sign(self, data: bytes) -> bytes:
        return self.key.sign(data, ec.ECDSA(SHA256()))

    def credentials(self) -> Credentials:
        """What a listener shows: TLS 1.3, this certificate, and no tickets, for each connection is shaken anew."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, FILE)
            file.touch(mode=0o600)
            file.write_bytes(self.pem())
            context.load_cert_chain(file)
        return Credentials(self.certificate, context)


def _mark_of(data: bytes) -> MachineMark:
    found = _MACHINE.search(data)
    return MachineMark.parse(found[1].decode()) if found else NOWHERE
