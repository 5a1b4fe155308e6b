"""The script for CUDA machines, tried on the CPU: its table, its mismatch, its refusal."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "cuda.py"
CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("cuda_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_quantizer_and_family_has_its_row_and_each_engine_its_speed(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert script.main(CPU, small=True, compiles=True) == 0
    rows = capsys.readouterr().out.splitlines()
    compared = [row.split()[:3] for row in rows if row.endswith("ok")]
    for kind in ("llama", "gemma2", "gpt2"):
        assert [kind, "fp16", "fp32"] in compared
    for quant in ("fp16", "int8", "int4"):
        assert all(["llama", quant, dtype] in compared for dtype in ("fp16", "bf16", "fp32"))
        assert ["llama", "compiled", quant] in compared
        for name in (f"core {quant} bf16 ", f"core {quant} bf16 compiled "):
            assert any(row.startswith(name) and "tok/s" in row for row in rows)
    assert any(row.startswith("transformers bf16") and "tok/s" in row for row in rows)


def test_logits_that_differ_fail_it(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, calls = script.logits, 0

    def wrong_once(*arguments: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        found: Tensor = computed(*arguments, **options)
        return found + found.std() if calls == 2 else found

    monkeypatch.setattr(script, "logits", wrong_once)
    monkeypatch.setattr(script, "speed", lambda *_: None)
    assert script.main(CPU, small=True, compiles=False) == 1
    assert capsys.readouterr().out.count("MISMATCH") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_cuda_it_says_so_in_one_sentence() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr == "this benchmark needs a CUDA device, and torch sees none here\n"
