"""Who may use the API, as the command line says it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from core.cli.api_options import api_settings, own_headers
from core.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORE_API_KEY", raising=False)


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_settings(None, False, []).keys == frozenset()
    path = tmp_path / "keys"
    path.write_text("one\ntwo\n")
    assert api_settings(path, False, []).keys == {"one", "two"}
    monkeypatch.setenv("CORE_API_KEY", "three")
    assert api_settings(path, False, []).keys == {"one", "two", "three"}


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        api_settings(tmp_path / "nowhere", False, [])


@pytest.mark.parametrize("value", ["", "\n"])
def test_an_empty_variable_is_no_key(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CORE_API_KEY", value)
    with pytest.raises(ConfigError, match="CORE_API_KEY"):
        api_settings(None, False, [])


def test_a_key_and_no_key_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORE_API_KEY", "one")
    with pytest.raises(ConfigError, match="--allow-anonymous-api"):
        api_settings(None, True, [])


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://chat.example/x", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="origin"):
        api_settings(None, False, [origin])


def test_origins_are_taken() -> None:
    origins = ["https://chat.example", "http://localhost:3000", "*"]
    assert api_settings(None, False, origins).cors_origins == tuple(origins)


def test_a_bound_for_every_request_is_taken() -> None:
    assert api_settings(None, False, []).max_time == math.inf
    assert api_settings(None, False, [], 7.5).max_time == 7.5


def test_commands_send_the_first_key_along(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_headers() == {}
    monkeypatch.setenv("CORE_API_KEY", "one\ntwo\n")
    assert own_headers() == {"authorization": "Bearer one"}
