"""core top beside a running cluster, and where there is none."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from core.cli import app
from core.errors import CoreError, leaves


def test_it_shows_nodes_layers_and_the_kv_cache(pair: Any) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["top", "--once", "--url", pair.url], catch_exceptions=False)
    assert result.exit_code == 0
    for node in ("one", "two"):
        assert node in result.output
    assert "ready" in result.output
    assert "KV cache: " in result.output


def test_without_a_cluster_it_says_so() -> None:
    result = CliRunner().invoke(app, ["top", "--once", "--url", "http://127.0.0.1:1"])
    assert result.exception is not None
    [error] = leaves(result.exception)
    assert isinstance(error, CoreError)
    assert error.hint == "is `core serve` running there?"
