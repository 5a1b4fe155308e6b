"""`core keys`, and the file that it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.cli.keys import add, list_, revoke
from core.errors import ConfigError
from core.trust.api_keys import FILE, ApiKeys, digest
from core.trust.state_dir import StateDir

Output = pytest.CaptureFixture[str]


def made(name: str, folder: Path, capsys: Output, *, host: bool = False) -> str:
    add(name, host=host, state_dir=folder)
    return capsys.readouterr().out.splitlines()[0]


def test_a_key_is_shown_once_and_kept_as_a_hash(tmp_path: Path, capsys: Output) -> None:
    book = ApiKeys(StateDir.open(tmp_path / "host"))
    assert not book.had_any()
    anna, mine = made("anna", tmp_path / "host", capsys), made("me", tmp_path / "host", capsys, host=True)
    assert anna not in (tmp_path / "host" / FILE).read_text(encoding="utf-8")
    holders = [book.holder(digest(key)) for key in (anna, mine, "other")]
    assert [(each.name, each.host) for each in holders if each] == [("anna", False), ("me", True)]
    list_(state_dir=tmp_path / "host")
    listed = capsys.readouterr().out
    assert anna not in listed
    assert [line.split()[:2] for line in listed.splitlines()] == [["NAME", "MAY"], ["anna", "chat"], ["me", "host"]]


def test_a_revoked_key_is_nobodys_at_once(tmp_path: Path, capsys: Output) -> None:
    book = ApiKeys(StateDir.open(tmp_path / "host"))
    key = made("anna", tmp_path / "host", capsys)
    assert book.holder(digest(key)) is not None
    revoke("anna", state_dir=tmp_path / "host")
    assert book.holder(digest(key)) is None
    with pytest.raises(ConfigError, match="there is no key 'anna'"):
        revoke("anna", state_dir=tmp_path / "host")


def test_what_a_key_closed_stays_closed_until_a_restart(tmp_path: Path, capsys: Output) -> None:
    book = ApiKeys(StateDir.open(tmp_path / "host"))
    for name in ("anna", "bert"):
        made(name, tmp_path / "host", capsys)
    revoke("anna", state_dir=tmp_path / "host")
    assert "the last" not in capsys.readouterr().out
    revoke("bert", state_dir=tmp_path / "host")
    assert "it was the last" in capsys.readouterr().out
    assert book.had_any()
    assert not ApiKeys(StateDir.open(tmp_path / "host")).had_any()


@pytest.mark.parametrize("name", ["", "a b", "x" * 41, "anna"])
def test_a_name_that_cannot_be_or_is_taken_is_refused(tmp_path: Path, capsys: Output, name: str) -> None:
    made("anna", tmp_path / "host", capsys)
    with pytest.raises(ConfigError):
        add(name, state_dir=tmp_path / "host")
