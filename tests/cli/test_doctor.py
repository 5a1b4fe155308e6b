"""`core doctor`: each check on its own, and how the findings become lines and an exit status."""

import json
import shutil
import socket
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from core.cli import app, checks, doctor
from core.cli.checks import GB, Finding, Verdict
from core.runtime import device
from core.runtime.device import DeviceInfo

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on loopback that is taken."""
    with socket.create_server((checks.HOST, 0)) as server:
        yield server.getsockname()[1]


def test_torch_is_named_with_its_threads() -> None:
    import torch

    (finding,) = checks.torch_build()
    assert torch.__version__ in finding.detail
    assert str(torch.get_num_threads()) in finding.detail


def test_a_gpu_that_torch_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,) = checks.torch_build()
    assert finding.verdict is Verdict.WARN
    assert "CUDA" in finding.hint


def test_devices_are_shown_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [DeviceInfo("cuda:0", "cuda", "Big", 80 * GB), DeviceInfo("cpu", "cpu", "Small", 8 * GB)]
    monkeypatch.setattr(device, "detect", lambda: found)
    monkeypatch.setattr(device, "free_memory", lambda at: 79 * GB if at.type == "cuda" else GB)
    big, small = checks.devices()
    assert (big.verdict, big.subject, big.detail) == (Verdict.OK, "device cuda:0", "Big, 79.0 of 80.0 GB free")
    assert small.verdict is Verdict.WARN


def test_what_multiplies_weights_is_shown_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [DeviceInfo("cpu", "cpu", "Small", 8 * GB)]
    monkeypatch.setattr(device, "detect", lambda: found)
    shown = {finding.subject: finding.detail for finding in checks.quantizers()}
    assert {f"quantizer {name} on cpu" for name in ("fp16", "int8", "int4")} <= set(shown)
    assert all(shown.values())


def test_a_taken_port_is_a_warning_that_names_the_option(listener: int) -> None:
    (finding,) = checks.ports({listener: "--api-port"})
    assert finding.verdict is Verdict.WARN
    assert finding.subject == f"port {listener}"
    assert "--api-port" in finding.hint


def test_a_free_port_is_ok() -> None:
    (finding,) = checks.ports({0: "--api-port"})
    assert finding.verdict is Verdict.OK


def install(path: Path, name: str, requires: list[str]) -> None:
    info = path / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join(metadata) + "\n")
    (info / "entry_points.txt").write_text(f"[core.plugins]\n{name} = {name}\n")


def test_what_core_requires_is_within_its_bounds() -> None:
    findings = {finding.subject.split()[0]: finding for finding in checks.dependencies()}
    assert findings["core-cluster"].verdict is Verdict.OK


def test_a_plugin_whose_bounds_are_not_met_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(
        tmp_path,
        "core-plugin-demanding",
        ["core-cluster>=99", "no-such-thing>=1", "torch>=2", "neither-this; extra == 'more'"],
    )
    bad = [finding for finding in checks.dependencies() if finding.verdict is Verdict.BAD]
    assert {finding.subject for finding in bad} == {"requirements of core-plugin-demanding"}
    wrong_version, absent = sorted(finding.detail for finding in bad)
    assert wrong_version.startswith("core-cluster is ")
    assert wrong_version.endswith("not >=99")
    assert absent == "no-such-thing is not installed"


def test_a_broken_plugin_is_bad_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "core_plugin_absent", [])
    (finding,) = [finding for finding in checks.plugins() if finding.subject == "plugin core_plugin_absent"]
    assert finding.verdict is Verdict.BAD
    assert "No module named 'core_plugin_absent'" in finding.detail
    assert "core_plugin_absent" in finding.hint


def test_a_hub_that_answers_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    asked = []

    def head(url: str, *, timeout: float) -> httpx.Response:
        asked.append(url)
        return httpx.Response(200)

    monkeypatch.setattr(httpx, "head", head)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.example")
    (finding,) = checks.hub()
    assert finding.verdict is Verdict.OK
    assert asked == ["http://hub.example"]


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "no url", "http://[", ""])
def test_a_hub_that_cannot_be_reached_is_a_warning(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    (finding,) = checks.hub()
    assert finding.verdict is Verdict.WARN
    assert "still work" in finding.hint


def test_offline_mode_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (finding,) = checks.hub()
    assert finding.verdict is Verdict.WARN
    assert "HF_HUB_OFFLINE" in finding.detail


@pytest.mark.parametrize(("free", "verdict"), [(11 * GB, Verdict.OK), (9 * GB, Verdict.WARN)])
def test_disk_of_a_cache_that_does_not_exist_yet(
    free: int, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def disk_usage(path: Path) -> Usage:
        asked.append(path)
        return Usage(0, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "there"))
    (finding,) = checks.disk()
    assert finding.verdict is verdict
    assert asked == [tmp_path]
    assert str(tmp_path / "not" / "there") in finding.detail


def fine() -> Iterator[Finding]:
    yield Finding(Verdict.OK, "this", "works")


def broken_check() -> Iterator[Finding]:
    raise ImportError("no libcudart")
    yield


def test_a_check_that_fails_itself_is_bad_and_stops_no_other() -> None:
    first, second = checks.examine((broken_check, fine))
    assert (first.verdict, first.subject, first.detail) == (Verdict.BAD, "broken check", "ImportError: no libcudart")
    assert second.verdict is Verdict.OK


@pytest.mark.parametrize(
    ("verdict", "status", "in_all"),
    [
        (Verdict.OK, 0, "nothing is wrong"),
        (Verdict.WARN, 0, "1 warning, with which core runs here; see what to do above"),
        (Verdict.BAD, 1, "1 problem to be solved first, and 0 warnings"),
    ],
)
def test_lines_and_exit_status(verdict: Verdict, status: int, in_all: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(verdict, "port 1", "taken " * 40, "take another")
    monkeypatch.setattr(doctor, "examine", lambda: iter([finding]))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == status
    assert done.output == f"{verdict.value:5}port 1: {'taken ' * 40}\n     -> take another\n\n{in_all}\n"


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter([Finding(Verdict.BAD, "a", "b", "c")]))
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.output) == [{"verdict": "bad", "subject": "a", "detail": "b", "hint": "c"}]


def test_the_whole_of_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    subjects = {finding.subject.split()[0] for finding in checks.examine()}
    assert {"torch", "device", "port", "plugins", "core-cluster", "hub", "disk"} <= subjects
