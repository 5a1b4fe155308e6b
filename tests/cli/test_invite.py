"""`core invite` and `core members`, and where `core node` finds an invite."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from core.cli.invite import invite, seconds_of, when
from core.cli.joining import JOIN, ask, find_membership, read_link
from core.cli.members import members
from core.cli.node import node
from core.discovery.advert import Advert
from core.errors import ConfigError, CoreError
from core.trust import serving
from core.trust.cluster import Membership
from core.trust.link import PREFIX, InviteLink
from core.trust.register import Asker, Register
from core.trust.serving import Serving, announce, is_serving, sole_coordinator
from core.trust.state_dir import StateDir

Output = pytest.CaptureFixture[str]


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir.open(tmp_path / "host")
    announce(Serving(7123, ("192.168.1.50", "home.example.org")), state)
    return state


def made(state: StateDir, capsys: Output, **options: str) -> tuple[InviteLink, str]:
    invite(**{"expires": "24h", "name": "", "revoke": None, **options}, show=False, state_dir=state.path)
    printed, warned = capsys.readouterr()
    assert ("nobody can join yet" in warned and "End the core serve that runs" in warned) != is_serving(state)
    return InviteLink.parse(printed.splitlines()[0]), printed


def test_an_invite_leads_to_the_coordinator(state: StateDir, capsys: Output) -> None:
    link, printed = made(state, capsys, name="anna")
    assert (link.hosts, link.port) == (("192.168.1.50", "home.example.org"), 7123)
    assert "as anna" in printed
    with sole_coordinator(state):
        assert made(state, capsys)[0].port == 7123


def test_without_a_coordinator_it_leads_to_this_machines_addresses(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "reachable", lambda *_: ["10.1.2.3"])
    link, _ = made(StateDir.open(tmp_path / "new"), capsys)
    assert (link.hosts, link.port) == (("10.1.2.3",), 7001)
    monkeypatch.setattr(serving, "reachable", lambda *_: [])
    with pytest.raises(ConfigError, match="no address"):
        made(StateDir.open(tmp_path / "new"), capsys)


def test_invites_and_members_are_listed_and_undone(state: StateDir, capsys: Output) -> None:
    register = Register(state)
    link, _ = made(state, capsys, name="anna")
    open_one, _ = made(state, capsys, expires="30m")
    node = register.admit("ab" * 32, link.secret, "pc")
    first, second = register.read().invites
    invite(show=True, state_dir=state.path)
    head, used, unused = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "STATE", "EXPIRES", "NAME", "USED", "BY"]
    assert (used.split()[:2], used.split()[-1]) == ([first.id, "used"], node.node_id)
    assert unused.split()[:2] == [second.id, "open"]
    invite(revoke=second.id, show=False, state_dir=state.path)
    assert register.read().invites[1].state == "revoked"
    assert open_one.expires < link.expires

    capsys.readouterr()
    members(state_dir=state.path)
    _, away = capsys.readouterr().out.splitlines()
    assert away.split()[:2] == [node.node_id, "away"]
    assert away.endswith(when(node.last_seen))
    with sole_coordinator(state):
        members(state_dir=state.path)
    _, there = capsys.readouterr().out.splitlines()
    assert (there.split()[1], there.split()[-1]) == ("connected", "now")
    members(remove=node.node_id, state_dir=state.path)
    members(state_dir=state.path)
    assert capsys.readouterr().out.splitlines() == [
        f"{node.node_id} is no member any more",
        "no members: see core invite",
    ]
    with pytest.raises(ConfigError, match="no member 'anna'"):
        members(remove="anna", state_dir=state.path)


def test_who_asks_is_listed_and_answered_by_the_code_that_it_shows(state: StateDir, capsys: Output) -> None:
    register = Register(state)
    for code, name, expires in (("000042", "anna", 2**33), ("777777", "bert", 2**33), ("111111", "late", 1)):
        register.ask(Asker(code, name, code[:2] * 32, "192.168.1.9", expires))
    members(state_dir=state.path)
    assert "anna" not in capsys.readouterr().out, "nobody serves, so nobody waits"
    with sole_coordinator(state):
        members(state_dir=state.path)
    printed = capsys.readouterr().out
    assert "only if it shows the same code" in printed
    assert [line.split()[:3] for line in printed.splitlines()[-2:]] == [
        ["000042", "anna", "192.168.1.9"],
        ["777777", "bert", "192.168.1.9"],
    ]
    members(approve="000 042", state_dir=state.path)
    assert "is a member now" in capsys.readouterr().out
    members(deny="777777", state_dir=state.path)
    assert "bert is not let in" in capsys.readouterr().out
    assert [node.name for node in register.read().nodes] == ["anna"]
    for code in ("000042", "777777", "111111", ""):
        with pytest.raises(ConfigError, match="no machine asks"):
            members(approve=code, state_dir=state.path)


def test_one_thing_is_done_at_a_time(state: StateDir) -> None:
    with pytest.raises(ConfigError, match="--remove and --deny can't be done at once"):
        members(remove="anna", deny="000042", state_dir=state.path)
    with pytest.raises(ConfigError, match="--list and --revoke can't be done at once"):
        invite(show=True, revoke="abc", state_dir=state.path)


def test_there_may_be_nobody(tmp_path: Path, capsys: Output) -> None:
    invite(show=True, state_dir=tmp_path / "new")
    members(state_dir=tmp_path / "new")
    assert capsys.readouterr().out.splitlines() == ["no invites", "no members: see core invite"]


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800), ("24h", 86_400), (" 7d ", 604_800), ("365d", 31_536_000)])
def test_lengths_of_time(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "0h", "-1h", "1.5h", "366d", "999999d", "1w"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(ConfigError, match="30m, 24h or 7d"):
        seconds_of(text)


LINK = InviteLink(("192.168.1.50",), 7001, bytes(32), bytes(16), 2_000_000_000)


def test_a_link_comes_from_a_file_from_standard_input_or_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "invite").write_text(f"{LINK}\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{LINK}\n"))
    monkeypatch.setenv(JOIN, str(LINK))
    with caplog.at_level(logging.WARNING):
        assert read_link(None) == str(LINK)
        for join in (str(tmp_path / "invite"), "-"):
            assert InviteLink.parse(read_link(join) or "") == LINK
        assert read_link(None) is None, "the environment has lost it"
        assert caplog.records == []
        assert read_link(str(LINK)) == str(LINK)
    assert "can see an invite" in caplog.text
    assert PREFIX not in caplog.text
    with pytest.raises(ConfigError, match="no invite in"):
        read_link(str(tmp_path / "nothing"))


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_on_a_terminal_a_link_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: Output, *, on_a_terminal: bool
) -> None:
    typed = io.StringIO(f"{LINK}\n")
    monkeypatch.setattr(typed, "isatty", lambda: on_a_terminal, raising=False)
    monkeypatch.setattr("sys.stdin", typed)
    assert read_link("-") == f"{LINK}\n"
    assert capsys.readouterr() == ("", "Paste the link that the host sent:\n" if on_a_terminal else "")


def test_where_a_node_finds_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOIN, raising=False)
    (tmp_path / "invite").write_text(str(LINK))
    state = StateDir.open(tmp_path / "state")
    assert find_membership(None, None, None, state) is None
    assert not state.path.exists()
    joined = find_membership(str(tmp_path / "invite"), None, None, state)
    assert joined is not None
    joined.welcomed()
    assert find_membership(None, "127.0.0.1", None, state) is None
    with monkeypatch.context() as patch:
        patch.setenv(JOIN, str(LINK))
        assert find_membership(None, "127.0.0.1", None, state) is None, (
            "a coordinator's own nodes inherit its environment"
        )
    for host, port, expected in [
        (None, None, (("192.168.1.50",), 7001)),
        ("10.0.0.7", None, (("10.0.0.7",), 7001)),
        (None, 7009, (("192.168.1.50",), 7009)),
    ]:
        found = find_membership(None, host, port, state)
        assert found is not None
        assert (found.cluster.hosts, found.cluster.port) == expected


def found(number: int) -> Advert:
    return Advert(f"model-{number}", (f"192.168.1.{number}",), 7001, bytes([number]) * 32, 1)


def test_the_only_cluster_that_is_found_is_asked_and_of_several_the_one_with_the_key(tmp_path: Path) -> None:
    state = StateDir.open(tmp_path / "state")
    assert ask(None, [found(1)], state).cluster == replace(found(1).cluster(), asks=True)
    assert ask(found(2).key, [found(1), found(2)], state).cluster.hosts == ("192.168.1.2",)
    remembered = Membership.remembered(state)
    assert remembered is not None
    assert remembered.cluster.asks
    with pytest.raises(CoreError, match="no cluster was found"):
        ask(None, [], state)
    for key, clusters, said in [
        (None, [found(1), found(2)], "several clusters"),
        ("nosuchkey", [found(1)], found(1).key),
    ]:
        with pytest.raises(ConfigError, match=said):
            ask(key, clusters, state)


def test_an_address_and_a_search_contradict_each_other(tmp_path: Path) -> None:
    for option in ({"join": "-"}, {"cluster_host": "10.0.0.7"}, {"cluster_port": 7009}):
        with pytest.raises(ConfigError, match="leave out"):
            node(find=True, state_dir=tmp_path, **option)
