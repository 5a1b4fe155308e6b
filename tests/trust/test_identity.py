"""Keys are made once, kept from others, and given up where they were copied."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.errors import ConfigError, TrustError
from core.trust import machine
from core.trust.identity import Identity, short_id
from core.trust.machine import MachineMark
from core.trust.proof import new_nonce, signature, verified
from core.trust.state_dir import ENVIRONMENT, StateDir


def on_machine(monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    """`mark`: the system's id, and the cards."""
    monkeypatch.setattr(MachineMark, "here", lambda: MachineMark.parse(mark))


def test_a_state_directory_has_one_identity(state: StateDir) -> None:
    first = Identity.open(state)
    again = Identity.open(state)
    assert first.certificate == again.certificate
    assert first.fingerprint != Identity.fresh().fingerprint
    assert len(first.fingerprint) == 32
    assert len(short_id(first.fingerprint)) == 8


@pytest.mark.unix
def test_nobody_else_can_read_the_key(state: StateDir) -> None:
    Identity.open(state)
    assert state.path.stat().st_mode & 0o777 == 0o700
    assert (state.path / "identity.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.unix
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        Identity.open(StateDir.open(tmp_path))


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused_before_its_key_is_believed(state: StateDir) -> None:
    Identity.open(state)
    os.chown(state.path, 1234, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        StateDir.open(state.path)


@pytest.mark.unix
def test_a_key_that_others_could_read_is_theirs_no_more(state: StateDir) -> None:
    made = Identity.open(state)
    for file in state.path.iterdir():
        file.chmod(0o644)
    assert Identity.open(state).fingerprint == made.fingerprint
    assert all(file.stat().st_mode & 0o077 == 0 for file in state.path.glob("*.pem"))


def test_looking_for_something_makes_no_directory(tmp_path: Path) -> None:
    state = StateDir.open(tmp_path / "state")
    assert state.read("cluster.json") is None
    assert not state.path.exists()


def test_the_environment_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "there"))
    assert StateDir.open().path == tmp_path / "there"
    assert StateDir.open(tmp_path / "here").path == tmp_path / "here"


def test_a_file_where_the_directory_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(ConfigError, match="--state-dir"):
        Identity.open(StateDir.open(tmp_path / "state"))


@pytest.mark.parametrize(
    ("made_on", "opened_on", "kept"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("", "b", True),
        ("a", "", True),
        ("a 1 2", "a 2 3", True),
        ("a 1 2", "a 3", False),
        ("a 1", "a", True),
        ("a", "a 1", True),
        (" 1", " 2", False),
    ],
    ids=[
        "the same",
        "another",
        "made without a mark",
        "opened without one",
        "another card beside",
        "the disk's id and other cards",
        "no card any more",
        "a card for the first time",
        "cards alone",
    ],
)
def test_a_copied_state_directory_gets_a_fresh_identity(
    state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_on: str, opened_on: str, kept: bool
) -> None:
    on_machine(monkeypatch, made_on)
    original = Identity.open(state)
    shutil.copytree(state.path, tmp_path / "copy")
    on_machine(monkeypatch, opened_on)
    copy = StateDir.open(tmp_path / "copy")
    opened = Identity.open(copy)
    assert (opened.fingerprint == original.fingerprint) is kept
    assert Identity.open(copy).fingerprint == opened.fingerprint


def test_what_can_not_be_written_is_an_error_that_names_the_file(state: StateDir) -> None:
    (state.path / "taken").mkdir(parents=True)
    state.path.chmod(0o700)
    with pytest.raises(ConfigError, match="taken can't be written"):
        state.write("taken", b"")
    assert [path.name for path in state.path.iterdir()] == ["taken"], "no draft is left"
    with pytest.raises(ConfigError, match="taken can't be removed"):
        state.remove("taken")


def test_a_damaged_key_is_an_error_that_names_the_file(state: StateDir) -> None:
    state.write("identity.pem", b"machine: \nnonsense")
    with pytest.raises(ConfigError, match=r"identity\.pem"):
        Identity.open(state)


def test_key_and_certificate_of_different_origin_are_an_error(state: StateDir) -> None:
    key = Identity.fresh().pem().split(b"-----BEGIN CERTIFICATE")[0]
    certificate = Identity.fresh().pem().partition(b"-----BEGIN CERTIFICATE")
    state.write("identity.pem", key + certificate[1] + certificate[2])
    with pytest.raises(ConfigError, match="belong together"):
        Identity.open(state)


def test_a_machine_may_change_its_cards_one_after_another(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = set()
    for mark in ("a 1", "a 1 2", "a 2", "a 2 3", "a 3"):
        on_machine(monkeypatch, mark)
        fingerprints.add(Identity.open(state).fingerprint)
    assert len(fingerprints) == 1


def test_the_mark_is_of_the_system_and_of_the_network_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "machine-id"
    monkeypatch.setattr(machine, "_MACHINE_ID_FILES", (tmp_path / "none", file))
    cards = {name: [card(address)] for name, address in ADDRESSES.items()}
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: cards)
    without = MachineMark.here()
    assert (without.system, len(without.cards)) == ("", 1), "makers gave one of them"
    file.write_text("0123456789abcdef\n")
    here = MachineMark.here()
    assert here.cards == without.cards
    assert here.system
    assert MachineMark.parse(str(here)) == here
    assert not {"0123456789abcdef", "00163e112233"} & set(str(here).split())


ADDRESSES = {
    "eth0": "00:16:3e:11:22:33",
    "lo": "00:00:00:00:00:00",
    "docker0": "02:42:ac:11:00:02",
    "wlan0": "da-a1-19-00-00-01",
}


def card(address: str) -> SimpleNamespace:
    return SimpleNamespace(family=machine._LINK, address=address)


def test_a_proof_holds_for_what_it_was_made_for_and_nothing_else() -> None:
    dialler, listener, other = Identity.fresh(), Identity.fresh().fingerprint, Identity.fresh().fingerprint
    nonce = new_nonce()
    proof = signature(dialler, "node", nonce, listener)
    assert verified("node", dialler.certificate, proof, nonce, listener) == dialler.fingerprint
    for role, asked, by in [("peer", nonce, listener), ("node", new_nonce(), listener), ("node", nonce, other)]:
        with pytest.raises(TrustError):
            verified(role, dialler.certificate, proof, asked, by)  # type: ignore[arg-type]


def test_a_certificate_without_its_key_proves_nothing() -> None:
    victim, thief, listener, nonce = Identity.fresh(), Identity.fresh(), bytes(32), new_nonce()
    stolen = signature(thief, "node", nonce, listener)
    claims = [(victim.certificate, stolen), (None, stolen), (victim.certificate, None), (b"\x30\x82", stolen)]
    for certificate, proof in [*claims, (victim.certificate, b"")]:
        with pytest.raises(TrustError):
            verified("node", certificate, proof, nonce, listener)


def test_keys_are_not_shown() -> None:
    assert "PRIVATE" not in repr(Identity.fresh())
