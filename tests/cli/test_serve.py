"""`core serve` and who may use its API."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import trio
from typer.testing import CliRunner

from core.cli import app
from core.cli.serve import serving
from core.coordinator.settings import CoordinatorSettings
from core.errors import ConfigError, sole_error
from core.gateway.settings import ApiSettings
from core.interfaces.checkpoint import Source
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
    ("host", "api", "warned"),
    [
        ("0.0.0.0", ApiSettings(allow_anonymous=True), True),
        ("0.0.0.0", ApiSettings(keys=frozenset({"a-key"})), False),
        ("127.0.0.1", ApiSettings(), False),
    ],
)
async def test_an_api_that_is_open_to_everyone_says_so(
    settings: CoordinatorSettings, host: str, api: ApiSettings, warned: bool
) -> None:
    told: list[str] = []
    with trio.fail_after(60):
        async with serving(settings, host, 0, api, told.append) as server, httpx.AsyncClient() as client:
            url = server.url.replace("0.0.0.0", "127.0.0.1")
            assert (await client.get(f"{url}/v1/models")).status_code == (401 if api.keys else 200)
    assert any("WARNING" in line and "everyone" in line for line in told) == warned
