"""What is saved is what is read; what can't be read is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import ConfigError
from node_app.files import Folders
from node_app.joining import Target
from node_app.limits_form import limits_from
from node_app.machine import Machine
from node_app.settings import Hours, Limits, Settings, SettingsFile

DEFAULT = Settings("me")
CHOSEN = Settings(
    "me",
    Target("10.0.0.1", 7001, invited=True),
    True,
    Limits(2.5, 3, "cpu", Hours("22:00", "08:00"), False, None, 50, None),
)


def test_settings_come_back_as_they_were_saved(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path / "settings.json")
    file.save(CHOSEN)
    assert file.load(DEFAULT) == CHOSEN
    assert file.complaint == ""


def test_the_first_start_saves_the_default(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path / "settings.json")
    assert file.load(DEFAULT) == DEFAULT
    assert file.load(Settings("another")) == DEFAULT


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"node_id": 3}', b'{"node_id": "x", "limits": {"threads": 0}}'])
def test_a_broken_file_is_set_aside_and_reported(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(broken)
    file = SettingsFile(path)
    assert file.load(DEFAULT) == DEFAULT
    aside = tmp_path / "settings.broken"
    assert aside.read_bytes() == broken
    assert str(aside) in file.complaint
    assert SettingsFile(path).load(Settings("another")) == DEFAULT


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b'{"cpu_percent": 101}', "all cores others may use is a whole number from 1 to 100"),
        (b'{"memory_gb": 0}', "the memory to give is a number of gigabytes"),
        (b'{"threads": "two"}', "compute threads are a whole number"),
        (b'{"threads": 2000}', "compute threads are a whole number"),
        (b'{"threads": 9}', "9 threads are too many: this machine has 8 cores"),
        (b'{"memory_gb": 17}', "17 GB can't be given: this machine has 16.0 GB of memory"),
        (b'{"free_memory_gb": 16}', "16 GB are never free"),
        (b'{"hours": {"start": "25:00", "end": "08:00"}}', "two times of day, like 22:30"),
        (b'{"hours": {"start": "08:00", "end": "08:00"}}', "two times of day, like 22:30"),
        (b"nonsense", "did not come whole"),
    ],
)
def test_a_limit_that_can_not_be_is_refused_in_a_persons_words(text: bytes, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        limits_from(text, Machine(16 * 10**9, 8, 0, ()))
    assert "`" not in str(caught.value)


def test_a_gpu_may_give_more_than_the_machine_has() -> None:
    assert limits_from(b'{"memory_gb": 20}', Machine(16 * 10**9, 8, 24 * 10**9, ())).memory_gb == 20


@pytest.mark.unix
def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    folders = Folders.under(tmp_path)
    file = SettingsFile(folders.config / "settings.json")
    file.save(CHOSEN)
    assert file.path.stat().st_mode & 0o077 == 0
    assert folders.state.stat().st_mode & 0o077 == 0
