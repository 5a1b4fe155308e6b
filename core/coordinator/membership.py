"""The host's own view of who may join: what `core invite` and `core members` do, for whoever asks the API."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import trio

from core.coordinator.settings import CoordinatorSettings
from core.errors import ConfigError
from core.interfaces.membership import AskerEntry, InviteEntry, MemberEntry, MembershipStatus, NewInvite
from core.trust.addresses import is_loopback
from core.trust.invite import new_invite
from core.trust.register import Register
from core.trust.state_dir import StateDir

T = TypeVar("T")
HINT = "end `core serve`, and start it with --node-host 0.0.0.0"


class HostsRegister:
    """The Membership of core.interfaces.membership. `tokens` tells how many have passed a node, by its id."""

    def __init__(self, settings: CoordinatorSettings, tokens: Callable[[], Mapping[str, int]]) -> None:
        self._settings = settings
        self._tokens = tokens

    @property
    def _closed(self) -> str:
        host = self._settings.node_host
        return f"machines join at {host} alone, which leads nowhere from elsewhere" if is_loopback(host) else ""

    async def status(self) -> MembershipStatus:
        if self._closed:
            return MembershipStatus(f"{self._closed}: {HINT}")
        return await trio.to_thread.run_sync(self._read, dict(self._tokens()))

    async def invite(self, seconds: int, name: str) -> NewInvite:
        made, link = await self._do(lambda state: new_invite(state, seconds, name))
        return NewInvite(made.id, str(link), link.expires, link.hosts, link.port)

    async def revoke(self, id: str) -> str:
        await self._do(lambda state: Register(state).revoke(id))
        return id

    async def approve(self, code: str) -> str:
        return await self._do(lambda state: Register(state).approve(code).node_id)

    async def deny(self, code: str) -> str:
        return await self._do(lambda state: Register(state).deny(code).name)

    async def remove(self, name: str) -> str:
        return await self._do(lambda state: Register(state).remove(name).node_id)

    async def _do(self, work: Callable[[StateDir], T]) -> T:
        if self._closed:
            raise ConfigError("nobody can join from elsewhere", self._closed, HINT)
        return await trio.to_thread.run_sync(lambda: work(StateDir.open(self._settings.state_dir)))

    def _read(self, tokens: Mapping[str, int]) -> MembershipStatus:
        entries, now = Register(StateDir.open(self._settings.state_dir)).read(), time.time()
        names = {node.fingerprint: node.node_id for node in entries.nodes}
        return MembershipStatus(
            closed="",
            members=tuple(
                MemberEntry(each.node_id, each.connected, each.first_seen, each.last_seen, tokens.get(each.node_id, 0))
                for each in entries.nodes
                if not each.removed
            ),
            asking=tuple(
                AskerEntry(each.code, each.name, each.host, each.expires)
                for each in entries.asking
                if each.expires > now
            ),
            invites=tuple(
                InviteEntry(
                    each.id, each.state, each.created, each.expires, each.name, names.get(each.used_by, each.used_by)
                )
                for each in entries.invites
            ),
        )
