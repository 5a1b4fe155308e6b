"""What a quantized model costs in quality: the benchmark's bounds, on the first tokens of its texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from platformdirs import user_cache_path

from core.cli.demo_model import MEMBER
from core.testing.fork_server import run_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    not (user_cache_path("core") / "models" / Path(MEMBER).name).exists(), reason="the demo's model isn't here"
)
def test_a_quantized_model_predicts_nearly_as_well() -> None:
    run = "import runpy, sys; sys.path.insert(0, {0!r}); runpy.run_path({0!r} + '/perplexity.py', run_name='__main__')"
    options = ("--tokens", "160", "--quant", "int8", "int4", "--dtype", "bf16")
    done = run_python("-c", run.format(str(ROOT / "benchmarks")), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("%\n") == 3, done.stdout
