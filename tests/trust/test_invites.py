"""Invites: one link lets one machine in, once, in time, unless it was revoked."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from dataclasses import replace

import pytest

from core.errors import ConfigError, TrustError
from core.node.settings import NodeSettings
from core.trust import register as registers
from core.trust.cluster import Membership
from core.trust.invite import new_invite
from core.trust.link import PREFIX, InviteLink
from core.trust.register import Register
from core.trust.serving import Serving, announce, last_serving
from core.trust.state_dir import StateDir

HOUR = 3600
A, B = "aa" * 32, "bb" * 32
LINK = InviteLink(
    ("192.168.1.50", "2001:db8::7", "home.example.org"), 7001, bytes(range(32)), bytes(range(16)), 2_000_000_000
)


@pytest.fixture
def register(state: StateDir) -> Register:
    return Register(state)


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(registers.time, "time", clock)
    return clock


def test_a_link_is_short_and_says_all() -> None:
    assert InviteLink.parse(str(LINK)) == LINK
    assert InviteLink.parse(f"  {LINK}/\n") == LINK
    lone = InviteLink(("192.168.1.50",), 7001, bytes(32), bytes(16), 2_000_000_000)
    assert len(str(lone)) <= 100


OLD = (
    "core://join/AQABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4fAAECAwQFBgcICQoLDA0OD3c1lAAbWQMAwKgBMv8gAQ24AAAAAAAAAAAAAAAH"
    "EGhvbWUuZXhhbXBsZS5vcmfTh-L-"
)


def test_a_link_names_its_transport_and_an_old_one_means_the_default() -> None:
    assert str(LINK) == OLD
    assert InviteLink.parse(OLD).transport == "trio-websocket"
    named = replace(LINK, transport="tcp")
    assert InviteLink.parse(str(named)) == named
    with pytest.raises(ConfigError, match="no invite can name the transport 'two words'"):
        str(replace(LINK, transport="two words"))


@pytest.mark.parametrize("transport", ["trio-websocket", "tcp"])
def test_who_joins_remembers_the_transport(state: StateDir, transport: str) -> None:
    announce(Serving(7001, ("10.0.0.1",), transport), state)
    _, link = new_invite(state, HOUR)
    membership = Membership.join(str(link), state)
    membership.at("10.0.0.2", None)
    membership.welcomed()
    remembered = Membership.remembered(state)
    assert remembered is not None
    assert NodeSettings("pc", membership=remembered).reached_by == transport
    assert NodeSettings("pc", membership=remembered, transport="other").reached_by == "other"


def test_what_was_written_before_transports_had_names_reads(state: StateDir) -> None:
    old = {"hosts": ["10.0.0.1"], "port": 7001, "fingerprint": b64encode(bytes(32)).decode()}
    state.write("cluster.json", json.dumps(old).encode())
    state.write("serving.json", json.dumps({"hosts": ["10.0.0.1"], "port": 7001}).encode())
    remembered, serving = Membership.remembered(state), last_serving(state)
    assert remembered is not None
    assert serving is not None
    assert remembered.cluster.transport == serving.transport == "trio-websocket"


def test_a_link_does_not_show_its_secret() -> None:
    assert "secret" not in repr(LINK)


@pytest.mark.parametrize("text", ["", "hello", "http://join/abc", "core://join", "core://other/abc"])
def test_what_is_no_link_is_told_so(text: str) -> None:
    with pytest.raises(ConfigError, match="no invite"):
        InviteLink.parse(text)


@pytest.mark.parametrize("link", [LINK, replace(LINK, transport="tcp")], ids=["default", "tcp"])
def test_a_link_that_was_not_copied_whole_is_told_so(link: InviteLink) -> None:
    text, rng = str(link), random.Random(1)
    for end in range(len(PREFIX), len(text)):
        with pytest.raises(ConfigError, match="damaged"):
            InviteLink.parse(text[:end])
    for _ in range(500):
        at = rng.randrange(len(PREFIX), len(text))
        mutant = text[:at] + rng.choice("Aa0-_ é%") + text[at + 1 :]
        if mutant != text:
            with pytest.raises(ConfigError):
                InviteLink.parse(mutant)


def test_an_invite_lets_one_machine_in_once(register: Register) -> None:
    _, secret = register.invite(HOUR, "anna")
    node = register.admit(A, secret, "pc")
    assert (node.name, node.connected) == ("anna", True)
    assert register.admit(A, secret, "pc").fingerprint == A, "a machine that did not hear the answer comes again"
    assert register.admit(A, None, "pc").fingerprint == A, "the key is enough from now on"
    with pytest.raises(TrustError, match="used already"):
        register.admit(B, secret, "other")
    assert [invite.state for invite in register.read().invites] == ["used"]
    assert register.members() == {bytes.fromhex(A)}


def test_an_expired_invite_lets_nobody_in(register: Register, clock: Clock) -> None:
    _, secret = register.invite(HOUR)
    clock.now += HOUR
    with pytest.raises(TrustError, match=r"expired on 2027-01-15 at 09:00 UTC"):
        register.admit(A, secret, "pc")


def test_a_revoked_invite_lets_nobody_in(register: Register) -> None:
    invite, secret = register.invite(HOUR)
    register.revoke(invite.id)
    with pytest.raises(TrustError, match="revoked"):
        register.admit(A, secret, "pc")
    with pytest.raises(ConfigError, match="no open invite"):
        register.revoke(invite.id)


def test_strangers_and_made_up_secrets_are_refused(register: Register) -> None:
    register.invite(HOUR)
    with pytest.raises(TrustError, match="does not know this machine"):
        register.admit(A, None, "pc")
    with pytest.raises(TrustError, match="no such invite"):
        register.admit(A, bytes(16), "pc")
    assert register.members() == frozenset()


def test_a_removed_machine_needs_a_new_invite(register: Register) -> None:
    _, first = register.invite(HOUR)
    node = register.admit(A, first, "pc")
    assert register.remove(f"pc-{node.short_id}").fingerprint == A
    assert register.members() == frozenset()
    with pytest.raises(TrustError, match="was removed"):
        register.admit(A, None, "pc")
    with pytest.raises(TrustError, match="used already"):
        register.admit(A, first, "pc")
    _, second = register.invite(HOUR, "back")
    assert register.admit(A, second, "pc").name == "back"
    assert [node.removed for node in register.read().nodes] == [False]


def test_a_name_that_two_have_is_not_enough_to_remove_one(register: Register) -> None:
    for fingerprint in (A, B):
        register.admit(fingerprint, register.invite(HOUR)[1], "pc")
    with pytest.raises(ConfigError, match="2 members are called 'pc'"):
        register.remove("pc")
    register.remove(register.read().nodes[0].short_id)
    assert register.members() == {bytes.fromhex(B)}
    with pytest.raises(ConfigError, match="no member"):
        register.remove("nobody")


def test_the_register_keeps_no_secret_and_forgets_old_invites(
    register: Register, state: StateDir, clock: Clock
) -> None:
    _, secret = register.invite(HOUR)
    assert secret.hex() not in (state.read("members.json") or b"").decode()
    clock.now += 40 * 86_400
    register.invite(HOUR)
    assert len(register.read().invites) == 1


def test_who_is_connected_is_known(register: Register, clock: Clock) -> None:
    register.admit(A, register.invite(HOUR)[1], "pc")
    clock.now += 10
    register.left(A)
    (node,) = register.read().nodes
    assert (node.connected, node.last_seen - node.first_seen) == (False, 10)
    register.admit(A, None, "pc")
    register.nobody_is_connected()
    assert not register.read().nodes[0].connected


def test_a_register_that_does_not_read_is_named(register: Register, state: StateDir) -> None:
    state.write("members.json", b'{"nodes": [{"name": 3}]}')
    with pytest.raises(ConfigError, match=r"members\.json"):
        register.members()


def test_a_node_remembers_its_cluster_and_not_the_secret(state: StateDir) -> None:
    assert Membership.remembered(state) is None
    membership = Membership.join(str(LINK), state)
    joining = Membership.remembered(state)
    assert joining is not None
    assert joining.cluster == membership.cluster
    assert joining.cluster.secret == LINK.secret
    membership.welcomed()
    member = Membership.remembered(state)
    assert member is not None
    assert member.cluster == membership.cluster
    assert (member.cluster.hosts, member.cluster.secret) == (LINK.hosts, None)
    kept = [path.read_text() for path in state.path.glob("*.json")]
    assert kept
    assert not [text for text in kept if b64encode(LINK.secret).decode().rstrip("=") in text]
    membership.leave()
    assert Membership.remembered(state) is None


def test_a_refused_invite_leaves_the_old_cluster_in_place(state: StateDir) -> None:
    old = Membership.join(str(LINK), state)
    old.welcomed()
    Membership.join(str(InviteLink(("10.0.0.1",), 7001, bytes(32), bytes(16), 1)), state).refused()
    now = Membership.remembered(state)
    assert now is not None
    assert now.cluster == old.cluster


def test_a_cluster_that_does_not_read_is_named(state: StateDir) -> None:
    state.write("cluster.json", b"{}")
    with pytest.raises(ConfigError, match=r"cluster\.json"):
        Membership.remembered(state)
