"""The host's register, as the API shows and changes it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from core.coordinator.membership import HostsRegister
from core.coordinator.settings import CoordinatorSettings
from core.errors import ConfigError
from core.interfaces.checkpoint import Source
from core.trust.link import InviteLink
from core.trust.register import Asker, Register
from core.trust.state_dir import StateDir

FINGERPRINT = "ab" * 32


@pytest.fixture
def settings(tmp_path: Path) -> CoordinatorSettings:
    hosts = ("192.168.1.2",)
    return CoordinatorSettings(Source("tiny"), "tiny", node_host="0.0.0.0", state_dir=tmp_path / "s", advertise=hosts)


@pytest.fixture
def register(settings: CoordinatorSettings) -> Register:
    return Register(StateDir.open(settings.state_dir))


async def test_a_machine_is_invited_joins_and_is_removed(
    settings: CoordinatorSettings, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.trust.serving.reachable", lambda listens_on: ["192.168.1.2"])
    counted: dict[str, int] = {}
    membership = HostsRegister(settings, lambda: counted)
    made = await membership.invite(3600, "anna")
    assert made.hosts == ("192.168.1.2",)
    secret = InviteLink.parse(made.link).secret
    node = register.admit(FINGERPRINT, secret, "laptop")
    counted[node.node_id] = 42
    told = await membership.status()
    assert [(each.node_id, each.connected, each.tokens) for each in told.members] == [(node.node_id, True, 42)]
    assert [(each.state, each.used_by) for each in told.invites] == [("used", node.node_id)]
    assert await membership.remove(node.node_id) == node.node_id
    assert (await membership.status()).members == ()


async def test_askers_are_let_in_or_sent_away_and_invites_revoked(
    settings: CoordinatorSettings, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.trust.serving.reachable", lambda listens_on: ["192.168.1.2"])
    membership, until = HostsRegister(settings, dict), int(time.time()) + 600
    for number in (1, 2):
        register.ask(Asker(f"12345{number}", f"m{number}", f"{number:064x}", "192.168.1.9", until))
    register.ask(Asker("999999", "late", "f" * 64, "192.168.1.9", int(time.time()) - 1))
    assert [each.code for each in (await membership.status()).asking] == ["123451", "123452"]
    assert (await membership.approve("123451")).startswith("m1-")
    assert await membership.deny("123 452") == "m2"
    with pytest.raises(ConfigError, match="no machine asks"):
        await membership.approve("123451")
    made = await membership.invite(3600, "")
    await membership.revoke(made.id)
    told = await membership.status()
    assert (told.asking, [each.state for each in told.invites]) == ((), ["revoked"])


async def test_on_this_machine_alone_there_is_nobody_to_let_in(settings: CoordinatorSettings) -> None:
    membership = HostsRegister(replace(settings, node_host="127.0.0.1"), dict)
    assert "--node-host 0.0.0.0" in (await membership.status()).closed
    with pytest.raises(ConfigError, match="nobody can join"):
        await membership.invite(3600, "")
