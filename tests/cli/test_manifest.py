"""`core manifest` by its command line."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.cli import app
from core.errors import CheckpointError, ConfigError, DamagedFile
from core.runtime import digests
from core.testing.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=2)


def test_it_prints_json_or_writes_it(model: Path, tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["manifest", str(model)])
    assert printed.exit_code == 0, printed.output
    found = json.loads(printed.stdout)
    weights = (model / "model.safetensors").read_bytes()
    assert {"name": "model.safetensors", "size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()} in found[
        "files"
    ]
    assert found["layers"] == 2
    written = CliRunner().invoke(app, ["manifest", str(model), "--out", str(tmp_path / "manifest.json")])
    assert (written.exit_code, written.stdout) == (0, "")
    assert json.loads((tmp_path / "manifest.json").read_text()) == found


def test_what_is_no_model_and_where_nothing_can_be_written_are_errors(model: Path, tmp_path: Path) -> None:
    nothing = CliRunner().invoke(app, ["manifest", str(tmp_path)])
    assert isinstance(nothing.exception, CheckpointError | ConfigError)
    nowhere = CliRunner().invoke(app, ["manifest", str(model), "--out", str(tmp_path)])
    assert isinstance(nowhere.exception, ConfigError)
    assert "can't be written" in str(nowhere.exception)


def test_verify_reads_the_files_once_more_and_names_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.setattr(digests, "REMEMBERED_BYTES", 0)
    model = tiny_checkpoint(tmp_path / "tiny", layers=2)
    first = CliRunner().invoke(app, ["manifest", str(model), "--verify"])
    assert (first.exit_code, "model.safetensors: not hashed before" in first.stdout) == (0, True)
    assert CliRunner().invoke(app, ["manifest", str(model)]).exit_code == 0
    whole = CliRunner().invoke(app, ["manifest", str(model), "--verify"])
    assert (whole.exit_code, "model.safetensors: ok, as it was hashed first" in whole.stdout) == (0, True)
    weights = model / "model.safetensors"
    content, before = weights.read_bytes(), weights.stat()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    rotten = CliRunner().invoke(app, ["manifest", str(model), "--verify"])
    assert isinstance(rotten.exception, DamagedFile)
    assert rotten.exception.files == ("model.safetensors",)
    assert "config.json: ok" in rotten.stdout
