"""Usage counter, log, and what the app makes of a node's activity."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.errors import ConfigError
from core.node.state import Activity
from node_app import logs
from node_app.gpu import gpu_meter
from node_app.status import State
from node_app.status_text import Facts, status_of
from node_app.usage_counter import WINDOW, UsageCounter

EVENING = datetime(2025, 6, 1, 23, 59, 50)
SECOND = timedelta(seconds=1)
JOINED = Facts(cluster="desk:7001")


def test_tokens_are_counted_by_the_day_and_by_the_second() -> None:
    usage = UsageCounter(None, EVENING)
    usage.note(100, EVENING)
    usage.note(150, EVENING + SECOND)
    assert usage.today == 150
    assert usage.per_second == 150 / WINDOW.total_seconds()
    usage.note(150, EVENING + SECOND + WINDOW)
    assert (usage.today, usage.per_second) == (150, 0)
    usage.note(157, EVENING + timedelta(minutes=1))
    assert usage.today == 7, "a day has begun"


def test_a_node_that_began_anew_takes_nothing_back() -> None:
    usage = UsageCounter(None, EVENING)
    usage.note(100, EVENING)
    usage.note(0, EVENING)
    usage.note(20, EVENING)
    assert usage.today == 120


def test_the_count_of_today_outlives_the_process() -> None:
    usage = UsageCounter(None, EVENING)
    usage.note(100, EVENING)
    assert UsageCounter(usage.save(), EVENING + SECOND).today == 100
    assert UsageCounter(usage.save(), EVENING + timedelta(days=1)).today == 0
    assert UsageCounter(b"nonsense", EVENING).today == 0


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    handlers, level = logging.root.handlers[:], logging.root.level
    logs.set_up(tmp_path / "log", to_stderr=False)
    yield tmp_path / "log"
    logging.basicConfig(handlers=handlers, level=level, force=True)


def test_a_crash_of_a_thread_is_in_the_log_with_its_trace(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = threading.Thread(target=lambda: {}["lost"])
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    thread.start()
    thread.join()
    text = logs.tail(log, 10_000)
    assert "CRITICAL" in text
    assert "KeyError: 'lost'" in text
    assert "Traceback" in text


def test_the_log_rotates(log: Path) -> None:
    for number in range(5000):
        logging.info("%d %s", number, "x" * 1000)
    files = sorted(log.parent.glob("log*"))
    assert [file.name for file in files] == ["log", "log.1", "log.2"]
    assert all(file.stat().st_size <= 2**20 for file in files)
    assert "4999" in logs.tail(log, 2000)


def test_a_log_that_can_not_be_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be written"):
        logs.set_up(tmp_path, to_stderr=False)


def test_a_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("first line\nsecond line\nthird line\n")
    assert logs.tail(path, 1000) == path.read_text()
    assert logs.tail(path, 15) == "third line\n"
    assert "can't be read" in logs.tail(tmp_path / "none", 10)


@pytest.mark.parametrize(
    ("said", "detail", "shown", "reason"),
    [
        ("connecting", "no answer", State.CONNECTING, "no answer"),
        ("waiting", "", State.WAITING, ""),
        ("spare", "", State.WAITING, "the cluster serves without this machine; it is in the next plan"),
        ("loading", "", State.LOADING, ""),
        ("ready", "", State.READY, ""),
        ("error", "no kernel", State.ERROR, "no kernel"),
    ],
)
def test_what_a_node_says_is_shown(said: str, detail: str, shown: State, reason: str) -> None:
    status = status_of(Activity(said, detail), JOINED)
    assert (status.state, status.reason, status.cluster) == (shown, reason, "desk:7001")


def test_a_download_is_told_from_a_load() -> None:
    activity = Activity("loading", layers=range(4))
    activity.advance("download", 1, 4)
    assert status_of(activity, JOINED).state is State.DOWNLOADING
    activity.advance("load", 1, 4)
    assert (status_of(activity, JOINED).state, status_of(activity, JOINED).fraction) == (State.LOADING, 0.25)


def test_a_node_that_computes_is_busy() -> None:
    assert status_of(Activity("ready"), Facts("desk", tokens_per_second=3)).state is State.BUSY


def test_a_pause_tells_whether_something_runs_still() -> None:
    paused = Facts(cluster="desk", pause="this machine runs on battery")
    holding = status_of(Activity("ready", layers=range(4)), paused)
    assert (holding.state, holding.reason) == (
        State.PAUSED,
        "this machine runs on battery, what runs is finished first",
    )
    assert status_of(Activity("spare"), paused).reason == "this machine runs on battery"


def test_before_anything_runs() -> None:
    assert status_of(None, Facts()).state is State.NOT_JOINED
    assert status_of(None, Facts(refusal="that is no invite")).reason == "that is no invite"
    assert status_of(None, JOINED).state is State.CONNECTING
    assert status_of(None, Facts("desk", failure="no device")).state is State.ERROR


def test_memory_is_that_of_what_is_held_now() -> None:
    activity = Activity("ready", layers=range(4), model="/models/tiny", weight_bytes=10, kv_bytes=3)
    status = status_of(activity, JOINED)
    assert (status.memory, status.model) == (13, "tiny")
    activity.become("spare")
    assert (status_of(activity, JOINED).memory, status_of(activity, JOINED).model) == (0, "")


class FakeNvml:
    """Two GPUs: this process and another on the first, nobody lately on the second."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotFound(NVMLError):
        pass

    def __init__(self, *, works: bool = True) -> None:
        self.works = works
        self.asked: list[int] = []

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self) -> None:
        self.works = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetProcessUtilization(self, index: int, since: int) -> list[SimpleNamespace]:
        if index == 1:
            raise self.NVMLError_NotFound("none")
        self.asked.append(since)
        other = os.getpid() + 1
        return [
            SimpleNamespace(pid=other, timeStamp=20, smUtil=30),
            SimpleNamespace(pid=other, timeStamp=10, smUtil=90),
            SimpleNamespace(pid=os.getpid(), timeStamp=15, smUtil=60),
        ]


def test_what_others_use_of_a_gpu_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    with gpu_meter() as others:
        assert others() == 30
        assert others() == 30
    assert fake.asked == [0, 20], "samples are asked for once"
    assert not fake.works


def test_without_a_gpu_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (FakeNvml(works=False), None):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        with gpu_meter() as others:
            assert others() is None
