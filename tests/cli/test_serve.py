"""`core serve` and who may use its API."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from typer.testing import CliRunner

from core.cli import app
from core.cli import serve as command
from core.cli.chat_options import read_template
from core.cli.serve import serving, show_progress, until_replaced
from core.coordinator.changes import Changes
from core.coordinator.settings import CoordinatorSettings
from core.errors import ConfigError, sole_error
from core.gateway.dialects.forms import ToolFormat, ToolSettings
from core.gateway.settings import ApiSettings
from core.interfaces.checkpoint import Source
from core.interfaces.engine import ClusterStatus
from core.testing.checkpoints import tiny_checkpoint


@pytest.fixture
def settings(tmp_path: Path) -> CoordinatorSettings:
    source = Source(str(tiny_checkpoint(tmp_path / "model")))
    return CoordinatorSettings(source=source, served_model_name="tiny", node_port=0, state_dir=tmp_path / "state")


def test_an_api_that_others_reach_is_refused_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CORE_API_KEY", raising=False)
    asked = ["serve", "--model", str(tmp_path), "--api-host", "0.0.0.0", "--api-port", "0", "--local-nodes", "0"]
    result = CliRunner().invoke(app, asked)
    assert isinstance(result.exception, Exception)
    error = sole_error(result.exception)
    assert isinstance(error, ConfigError)
    assert "--allow-anonymous-api" in str(error)


@pytest.mark.parametrize(
    ("host", "friends_go_to", "api", "warned"),
    [
        ("0.0.0.0", "192.168.1.5", ApiSettings(allow_anonymous=True), True),
        ("0.0.0.0", "192.168.1.5", ApiSettings(keys=frozenset({"a-key"})), False),
        ("127.0.0.1", "127.0.0.1", ApiSettings(), False),
    ],
)
async def test_it_says_where_its_page_is_and_whether_everyone_may_use_it(
    settings: CoordinatorSettings,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    friends_go_to: str,
    api: ApiSettings,
    warned: bool,
) -> None:
    monkeypatch.setattr("core.trust.addresses.reachable", lambda listens_on: ["192.168.1.5"])
    told: list[str] = []
    with trio.fail_after(300):
        async with serving(settings, host, 0, api, told.append) as server, httpx.AsyncClient() as client:
            url = server.url.replace("0.0.0.0", "127.0.0.1")
            assert (await client.get(f"{url}/v1/models")).status_code == (401 if api.keys else 200)
    port = server.url.rpartition(":")[2]
    assert told[:2] == [f"page        http://{friends_go_to}:{port}/", f"API         {server.url}/v1"]
    assert any("WARNING" in line and "everyone" in line for line in told) == warned


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], (120.0, True, False)),
        (["--recovery-time", "0", "--rebalance", "never", "--standby"], (0.0, False, True)),
        (["--recovery-time", "7.5", "--rebalance", "auto", "--no-standby"], (7.5, True, False)),
    ],
)
def test_what_becomes_of_a_lost_machine_is_told_to_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, options: list[str], told: tuple[float, bool, bool]
) -> None:
    made: list[CoordinatorSettings] = []

    def settings_of(**fields: Any) -> CoordinatorSettings:
        made.append(CoordinatorSettings(**fields))
        return made[0]

    monkeypatch.setattr(command, "CoordinatorSettings", settings_of)
    monkeypatch.setattr(command, "run", lambda main: None)
    result = CliRunner().invoke(app, ["serve", "--model", "any/model", *options])
    assert result.exit_code == 0, result.output
    assert (made[0].recovery_time, made[0].rebalance, made[0].standby) == told


def test_how_tools_are_told_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% endfor %}")
    made: list[Any] = []
    monkeypatch.setattr(command, "CoordinatorSettings", lambda **fields: made.append(CoordinatorSettings(**fields)))
    monkeypatch.setattr(command, "run", lambda main: None)
    monkeypatch.setattr(command, "replace", lambda api, **fields: made.append(replace(api, **fields)))
    options = ["--chat-template", str(template), "--tool-format", "mistral", "--tools-as-text", "--keep-responses", "5"]
    result = CliRunner().invoke(app, ["serve", "--model", "any/model", *options])
    assert result.exit_code == 0, result.output
    api, settings = made
    assert (api.tools, api.keep_responses) == (ToolSettings(ToolFormat.MISTRAL, as_text=True), 300)
    assert settings.chat_template == template.read_text()


def test_a_faulty_template_is_named(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}\n{{ m")
    with pytest.raises(ConfigError, match="is no chat template: line 2"):
        read_template(template)


class Played:
    """A coordinator whose status is the next of these each time, and at the end the last. Each look is a change."""

    def __init__(self, *statuses: ClusterStatus) -> None:
        self._statuses = list(statuses)
        self.changes = Changes()

    def status(self) -> ClusterStatus:
        self.changes.notify()
        return self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]


LOADING = ClusterStatus(
    model="tiny",
    state="loading",
    detail="n1 loads",
    progress=None,
    required_nodes=1,
    ready_nodes=0,
    route_epoch=1,
    layers=4,
    sessions=0,
    tokens_per_second=0.0,
    quant="fp16",
    dtype="fp32",
    wire_dtype="fp32",
    quality="as the checkpoint",
    nodes=(),
    left_out={},
)
READY = replace(LOADING, state="ready", detail="")


@pytest.mark.parametrize(
    ("later", "lines"),
    [
        ([replace(READY, route_epoch=2)], ["ready", "plan 2"]),
        ([LOADING, replace(READY, route_epoch=2)], ["loading: n1 loads", "ready", "plan 2"]),
    ],
)
async def test_a_plan_that_takes_anothers_place_is_printed(
    later: list[ClusterStatus], lines: list[str], capsys: pytest.CaptureFixture[str], autojump_clock: object
) -> None:
    played: Any = Played(LOADING, READY, READY, READY, later[0], *later)
    with trio.fail_after(300):
        epoch = await show_progress(played)
        await until_replaced(played, epoch)
        assert await show_progress(played) == 2
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    told = [line.partition(": 4 layers")[0] for line in printed]
    assert "plan 1: 4 layers, quant fp16, dtype fp32, wire dtype fp32 (as the checkpoint)" in printed
    assert told == ["loading: n1 loads", "ready", "plan 1", *lines]
