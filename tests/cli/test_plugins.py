"""`core plugins`, with real distributions laid on the path."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.cli import app

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lays a distribution of one module on the path, with an entry point of the module's name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def lay(module: str, source: str) -> None:
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[core.plugins]\n{module} = {module}\n")

    return lay


GOOD = """
from core import Planner, hookimpl

class Fair(Planner):
    name = "fair"
    def plan(self, request): ...

@hookimpl
def core_planners():
    return [Fair]
"""


def test_lists_each_plugin_with_what_it_adds(install: Install) -> None:
    install("core_plugin_fair", GOOD)
    done = CliRunner().invoke(app, ["plugins", "--json"])
    assert done.exit_code == 0, done.output
    loaded = {plugin["name"]: plugin for plugin in json.loads(done.output)["loaded"]}
    assert loaded["core_plugin_fair"] == {
        "name": "core_plugin_fair",
        "distribution": "core_plugin_fair",
        "version": "1.2",
        "adds": ["planner fair"],
    }
    assert "architecture llama" in loaded["llama"]["adds"]


def test_shows_a_broken_one_with_its_cause_and_still_exits_with_0(install: Install) -> None:
    install("core_plugin_sad", "raise RuntimeError('[no] luck')")
    done = CliRunner().invoke(app, ["plugins", "--json"])
    assert done.exit_code == 0, done.output
    broken = {plugin["name"]: plugin for plugin in json.loads(done.output)["broken"]}
    assert broken["core_plugin_sad"] == {
        "name": "core_plugin_sad",
        "distribution": "core_plugin_sad",
        "version": "1.2",
        "cause": "RuntimeError: [no] luck",
    }


def test_the_table_shows_the_same(install: Install) -> None:
    install("core_plugin_fair", GOOD)
    install("core_plugin_sad", "raise RuntimeError('[no] luck')")
    done = CliRunner().invoke(app, ["plugins"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line for line in done.output.splitlines() if line}
    assert "planner fair" in rows["core_plugin_fair"]
    assert "broken: RuntimeError: [no] luck" in rows["core_plugin_sad"]
