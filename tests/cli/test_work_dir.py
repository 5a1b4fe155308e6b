"""What a node needs only for a while lies where its user says."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from core.cli.work_dir import use_work_dir

PRINTED = """
import sys, tempfile
from pathlib import Path
from core.cli.work_dir import use_work_dir
use_work_dir(Path(sys.argv[1]))
from huggingface_hub import constants
print(tempfile.gettempdir(), constants.HF_XET_CACHE, sep="\\n")
"""


def test_temporary_files_downloads_and_compiled_code_are_kept_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    for variable in ("TMPDIR", "TEMP", "TMP", "TORCHINDUCTOR_CACHE_DIR", "HF_XET_CACHE"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HF_XET_CACHE", "chosen")
    use_work_dir(tmp_path / "deep" / "work")
    with tempfile.NamedTemporaryFile() as file:
        assert Path(file.name).parent == tmp_path / "deep" / "work"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "deep" / "work" / "compiled")
    assert os.environ["HF_XET_CACHE"] == "chosen", "what the user says by its own name holds"


def test_it_is_early_enough_for_the_library_that_downloads(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "HF_XET_CACHE"}
    run = [sys.executable, "-c", PRINTED, str(tmp_path)]
    told = subprocess.run(run, capture_output=True, text=True, check=True, env=env).stdout.splitlines()
    assert told == [str(tmp_path), str(tmp_path / "downloads")]
