"""Which plugins are loaded: those that were made for this API, and those that CORE_PLUGINS names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from core import API_VERSION, Plan, Planner, PlanRequest, hookimpl
from core.cli import app
from core.errors import PluginError
from core.installing import Installer, how_to_install, installer
from core.plugins import SWITCH, PluginHost

GOOD = """
from core import Planner, hookimpl

class Fair(Planner):
    name = "{name}"
    def plan(self, request): ...

@hookimpl
def core_planners():
    return [Fair]
"""


class Fair(Planner):
    name = "fair"

    def plan(self, request: PlanRequest) -> Plan:
        return Plan(())


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two outside plugins, each with a planner of its own name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("fair", "unfair"):
        (tmp_path / f"plugin_{name}.py").write_text(GOOD.format(name=name))
        info = tmp_path / f"plugin_{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plugin-{name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[core.plugins]\n{name} = plugin_{name}\n")


def made_for(version: object) -> PluginHost:
    host = PluginHost()
    host.register(SimpleNamespace(core_planners=hookimpl(lambda: [Fair]), CORE_API_VERSION=version), "fair")
    return host


@pytest.mark.parametrize("version", [API_VERSION, (API_VERSION, API_VERSION + 1)])
def test_a_plugin_that_was_made_for_this_api_is_loaded(version: object) -> None:
    assert made_for(version).planners.names() == ["fair"]


@pytest.mark.parametrize(
    ("version", "cause"),
    [
        (API_VERSION + 1, f"it was made for API version {API_VERSION + 1}, and this core has {API_VERSION}"),
        ((7, 8), f"it was made for API version 7 and 8, and this core has {API_VERSION}"),
        ("1", "its CORE_API_VERSION is '1': it must be a whole number, or a tuple of them"),
    ],
)
def test_one_that_was_made_for_another_is_set_aside_with_both_numbers(version: object, cause: str) -> None:
    host = made_for(version)
    assert host.planners.names() == []
    assert cause in host.broken[0].cause


def test_one_that_says_nothing_was_made_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.hookspecs.API_VERSION", 2)
    host = PluginHost()
    host.register(SimpleNamespace(core_planners=hookimpl(lambda: [Fair])), "old")
    assert "it was made for API version 1, and this core has 2" in host.broken[0].cause


@pytest.mark.parametrize(
    ("switch", "loaded"),
    [
        (None, {"fair", "unfair"}),
        ("", {"fair", "unfair"}),
        ("none", set()),
        ("fair", {"fair"}),
        (" fair,none", {"fair"}),
    ],
)
def test_the_switch_says_which_outside_plugins_are_loaded(
    others: None, monkeypatch: pytest.MonkeyPatch, switch: str | None, loaded: set[str]
) -> None:
    monkeypatch.setenv(SWITCH, switch) if switch is not None else monkeypatch.delenv(SWITCH, raising=False)
    host = PluginHost.installed()
    assert {"fair", "unfair"} & {plugin.name for plugin in host.loaded} == loaded
    assert {"fair", "unfair"} & {plugin.name for plugin in host.switched_off} == {"fair", "unfair"} - loaded
    assert "llama" in host.architectures.names()


def test_who_asks_for_what_is_switched_off_is_told(others: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "none")
    with pytest.raises(PluginError, match=r"CORE_PLUGINS leaves out the plugins .*'fair'"):
        PluginHost.installed().planners.get("fair")
    shown = CliRunner().invoke(app, ["plugins"], env={"COLUMNS": "200"})
    assert "left out by CORE_PLUGINS" in shown.output


def test_a_name_that_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "fare")
    assert ("fare", "CORE_PLUGINS names it, and it is not there") in [
        (broken.name, broken.cause) for broken in PluginHost.installed().broken
    ]


@pytest.mark.parametrize(
    ("marker", "found"),
    [("pipx_metadata.json", Installer.PIPX), ("uv-receipt.toml", Installer.UV_TOOL), ("pyvenv.cfg", Installer.PIP)],
)
def test_what_installed_this_core_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str, found: Installer
) -> None:
    (tmp_path / marker).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert installer() is found
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert installer() is Installer.APP


@pytest.mark.parametrize(
    ("distribution", "by", "how"),
    [
        ("core-plugin-x", "pip", "run `pip install core-plugin-x==2.0`"),
        ("core-plugin-x", "", "run `pip install core-plugin-x==2.0`"),
        ("core-plugin-x", "pipx", "run `pipx inject core-cluster core-plugin-x==2.0`"),
        ("core-plugin-x", "uv tool", "run `uv tool install core-cluster --with core-plugin-x==2.0`"),
        ("core-cluster", "pipx", "run `pipx install --force core-cluster==2.0`"),
        ("core-cluster", "app", "install the app of core 2.0"),
    ],
)
def test_a_plugin_comes_as_core_came(distribution: str, by: str, how: str) -> None:
    assert how_to_install(distribution, "2.0", by) == how


def test_the_packed_app_takes_no_plugins_and_says_what_does() -> None:
    told: Any = how_to_install("core-plugin-x", "2.0", "app")
    assert "the packed app takes no plugins" in told
    assert "`pipx inject core-cluster core-plugin-x==2.0`" in told
