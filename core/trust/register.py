"""The coordinator's register: open invites, and the machines whose keys are known. A file that every `core` may edit.

`core serve`, `core invite` and `core members` meet in it, under a lock, whether or not a coordinator runs.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Literal

import msgspec

from core.errors import ConfigError, TrustError
from core.trust.identity import short_id
from core.trust.link import SECRET_BYTES
from core.trust.state_dir import StateDir

FILE = "members.json"
_KEPT_SECONDS = 30 * 86_400
"""How long an invite is remembered after its expiry, so that whoever comes with it is told what became of it."""
_LONGEST_NAME = 40
_ASK = "ask the host for a new one"
_UNKNOWN = "this coordinator does not know this machine: ask its host for an invite, and join with that"
_REMOVED = "this machine was removed from the cluster: ask its host for a new invite"


class Invite(msgspec.Struct):
    """`name` is what the machine will be called, "" for its own name; times are in seconds since 1970."""

    id: str
    secret_hash: str
    created: int
    expires: int
    name: str = ""
    used_by: str = ""
    revoked: bool = False

    @property
    def state(self) -> Literal["open", "used", "revoked", "expired"]:
        if self.used_by:
            return "used"
        if self.revoked:
            return "revoked"
        return "expired" if time.time() >= self.expires else "open"


class KnownNode(msgspec.Struct):
    """A machine with a standing credential: the fingerprint of its certificate, in hex."""

    name: str
    fingerprint: str
    first_seen: int
    last_seen: int
    connected: bool = False
    removed: bool = False

    @property
    def short_id(self) -> str:
        return short_id(bytes.fromhex(self.fingerprint))

    @property
    def node_id(self) -> str:
        """What the cluster calls it: nobody else's key makes the same."""
        return f"{self.name}-{self.short_id}"


class Asker(msgspec.Struct, frozen=True):
    """A machine that asks to join, and waits for the host's answer until `expires`; `code` is what it shows."""

    code: str
    name: str
    fingerprint: str
    host: str
    expires: int


class Entries(msgspec.Struct):
    invites: list[Invite] = []
    nodes: list[KnownNode] = []
    asking: list[Asker] = []

    def node(self, fingerprint: str) -> KnownNode | None:
        return next((node for node in self.nodes if node.fingerprint == fingerprint), None)


class Register:
    def __init__(self, state: StateDir) -> None:
        self._state = state

    def version(self) -> tuple[int, int]:
        """Another one whenever an entry was changed, by whichever process."""
        return self._state.version(FILE)

    def read(self) -> Entries:
        """Raises ConfigError for a file that does not read."""
        data = self._state.read(FILE)
        try:
            return msgspec.json.decode(data, type=Entries) if data is not None else Entries()
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"{self._state.path / FILE} does not read", str(error), "mend it, or move it away to begin anew"
            ) from None

    @contextmanager
    def _edited(self) -> Iterator[Entries]:
        """The entries under the lock; what the block does to them is written at its end."""
        with self._state.lock():
            entries = self.read()
            yield entries
            horizon = time.time() - _KEPT_SECONDS
            entries.invites = [invite for invite in entries.invites if invite.expires > horizon]
            self._state.write(FILE, msgspec.json.format(msgspec.json.encode(entries)))

    def invite(self, seconds: int, name: str = "") -> tuple[Invite, bytes]:
        """A new invite with its secret, which is kept nowhere."""
        secret, now = secrets.token_bytes(SECRET_BYTES), int(time.time())
        with self._edited() as entries:
            taken = {invite.id for invite in entries.invites}
            id = next(id for id in iter(lambda: secrets.token_hex(3), "") if id not in taken)
            invite = Invite(id, _hash(secret), now, now + seconds, name)
            entries.invites.append(invite)
        return invite, secret

    def revoke(self, id: str) -> None:
        """Raises ConfigError where there is no open invite of that id."""
        with self._edited() as entries:
            for invite in entries.invites:
                if invite.id == id and invite.state == "open":
                    invite.revoked = True
                    return
        raise ConfigError(f"there is no open invite {id!r}", "", "see `core invite --list`")

    def remove(self, name: str) -> KnownNode:
        """By name, id of the key, or both as nodes are shown. Raises ConfigError where that is nobody, or several."""
        with self._edited() as entries:
            found = [n for n in entries.nodes if not n.removed and name in (n.name, n.short_id, n.node_id)]
            if len(found) != 1:
                raise ConfigError(
                    f"there is no member {name!r}" if not found else f"{len(found)} members are called {name!r}",
                    "",
                    "see `core members`; the eight characters of a key are a name too",
                )
            found[0].removed, found[0].connected = True, False
            return found[0]

    def admit(self, fingerprint: str, secret: bytes | None, name: str) -> KnownNode:
        """A machine whose key is known, or that brings an invite, which is used up by it.

        Raises TrustError with a sentence for everybody else.
        """
        now = int(time.time())
        with self._edited() as entries:
            node = entries.node(fingerprint)
            if node is None or node.removed:
                if not secret:
                    raise TrustError("not a member", _UNKNOWN if node is None else _REMOVED)
                invite = _redeemed(entries.invites, secret)
                invite.used_by = fingerprint
                node = _registered(entries, fingerprint, invite.name or name)
            node.last_seen, node.connected = now, True
            return node

    def ask(self, asker: Asker) -> Asker:
        """Puts it to the host, by a name that can be shown. Raises TrustError where another machine has its code."""
        with self._edited() as entries:
            others = [other for other in entries.asking if other.fingerprint != asker.fingerprint]
            if any(other.code == asker.code for other in others):
                raise TrustError("the code is taken", "another machine that asks has the same code: ask again")
            asker = msgspec.structs.replace(asker, name=_plain(asker.name))
            entries.asking = [*others, asker]
        return asker

    def withdraw(self, asker: Asker) -> None:
        with self._edited() as entries:
            entries.asking = [other for other in entries.asking if other != asker]

    def answer_to(self, asker: Asker) -> bool | None:
        """Whether the host approved; None before it answered."""
        entries = self.read()
        if asker in entries.asking:
            return None
        node = entries.node(asker.fingerprint)
        return node is not None and not node.removed

    def approve(self, code: str) -> KnownNode:
        """Makes the machine that shows `code` a member. Raises ConfigError where none asks with it."""
        with self._edited() as entries:
            asker = _taken(entries, code)
            return _registered(entries, asker.fingerprint, asker.name)

    def deny(self, code: str) -> Asker:
        """Raises ConfigError where no machine asks with this code."""
        with self._edited() as entries:
            return _taken(entries, code)

    def left(self, fingerprint: str) -> None:
        with self._edited() as entries:
            if node := entries.node(fingerprint):
                node.last_seen, node.connected = int(time.time()), False

    def nobody_is_connected(self) -> None:
        """For a coordinator that begins: the one before it may have ended without a word."""
        with self._edited() as entries:
            entries.asking = []
            for node in entries.nodes:
                node.connected = False

    def members(self) -> frozenset[bytes]:
        """The fingerprints of those who may be connected now."""
        return frozenset(bytes.fromhex(node.fingerprint) for node in self.read().nodes if not node.removed)


def _registered(entries: Entries, fingerprint: str, name: str) -> KnownNode:
    """A member from now on, new or again."""
    node = entries.node(fingerprint)
    if node is None:
        now = int(time.time())
        node = KnownNode("", fingerprint, now, now)
        entries.nodes.append(node)
    node.removed, node.name = False, _plain(name)
    return node


def _taken(entries: Entries, code: str) -> Asker:
    """Whoever asks with `code`, spaces or not, and asks no more."""
    wanted = re.sub(r"[\s-]", "", code)
    for asker in entries.asking:
        if hmac.compare_digest(asker.code.encode(), wanted.encode()) and asker.expires > time.time():
            entries.asking.remove(asker)
            return asker
    raise ConfigError(
        f"no machine asks to join with the code {code!r}",
        "its code changes whenever it asks anew",
        "see `core members`, and compare with what that machine shows now",
    )


def _plain(name: str) -> str:
    """A name that can stand in a log, a table or a command."""
    return re.sub(r"[^\w.-]+", "-", name)[:_LONGEST_NAME].strip("-") or "node"


def _hash(secret: bytes) -> str:
    return sha256(b"core invite " + secret).hexdigest()


def _redeemed(invites: list[Invite], secret: bytes) -> Invite:
    """The invite that `secret` opens. Raises TrustError where it opens none, saying why."""
    wanted = _hash(secret)
    invite = next((invite for invite in invites if hmac.compare_digest(invite.secret_hash, wanted)), None)
    if invite is None:
        raise TrustError("not a member", f"this coordinator made no such invite, or forgot it long ago: {_ASK}")
    if invite.state == "used":
        raise TrustError("not a member", f"this invite was used already, and each lets one machine in: {_ASK}")
    if invite.state == "revoked":
        raise TrustError("not a member", f"this invite was revoked by the host: {_ASK}")
    if invite.state == "expired":
        raise TrustError("not a member", f"this invite expired on {_date(invite.expires)}: {_ASK}")
    return invite


def _date(seconds: int) -> str:
    return time.strftime("%Y-%m-%d at %H:%M UTC", time.gmtime(seconds))
