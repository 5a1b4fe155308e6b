"""The comparison with llama.cpp asks it for the same work: a prompt, then one token at a time."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "beside_llama.py"


class FakeLlama:
    """Remembers what it was asked to evaluate; the next token is one more than the last."""

    def __init__(self) -> None:
        self.evaluated: list[list[int]] = [[99]]

    def reset(self) -> None:
        self.evaluated.clear()

    def eval(self, tokens: list[int]) -> None:
        self.evaluated.append(list(tokens))

    def sample(self, *, temp: float) -> int:
        assert temp == 0.0
        return self.evaluated[-1][-1] + 1


def test_it_decodes_token_by_token_after_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("llama_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    llama = FakeLlama()
    assert script.theirs(llama, [5, 6, 7], 3) > 0
    assert llama.evaluated == [[5, 6, 7], [8], [9], [10]]
