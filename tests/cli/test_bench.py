"""`core bench` on a tiny model: its figures, its table, and what it refuses."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from core.cli import app
from core.errors import ConfigError, PluginError
from core.testing.checkpoints import tiny_checkpoint

SHORT = ("--prompt-tokens", "8", "--tokens", "2", "--rounds", "2", "--threads", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("bench"))


def run(path: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", "--model", str(path), *SHORT, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_it_prints_both_rates_with_their_spread(path: Path) -> None:
    output = run(path, "--dtype", "fp32")
    assert "6 layers, architecture llama, quant fp16, dtype fp32 (as the checkpoint)" in output
    for phase in ("prefill", "decode"):
        [line] = [line for line in output.splitlines() if line.startswith(phase)]
        assert " tokens/s (" in line
    assert "dispatch" not in output


@pytest.mark.parametrize("compiled", [True, False])
def test_it_says_what_was_compiled(path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: seen.append(function.__name__) or function)
    assert ("6 layers, compiled" in run(path, "--dtype", "fp32", *["--compile"] * compiled)) is compiled
    assert ("_before" in seen) is ("_after" in seen) is compiled


def test_a_profile_has_a_row_for_each_part(path: Path) -> None:
    rows = [line.split()[0] for line in run(path, "--quant", "int8", "--profile").splitlines() if line.strip()]
    for part in ("linear", "attention", "norm", "rope", "activation", "other", "dispatch"):
        assert part in rows
    for part in ("embedding", "head", "sampling", "codec", "link"):
        assert part in rows
    assert rows.count("int8") >= 4


@pytest.mark.parametrize(
    ("arguments", "kind", "reason"),
    [
        (("--tokens", "600"), ConfigError, "don't fit the model's context"),
        (("--device", "abacus"), ConfigError, "no device 'abacus'"),
        (("--quant", "int5"), PluginError, "no quantizer named 'int5'"),
    ],
)
def test_what_can_not_be_had_is_refused(
    path: Path, arguments: tuple[str, ...], kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        run(path, *arguments)
