"""A model whose greedy text is known, a way to hold the stages up, and a look at the route."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trio.testing import MockClock

from core.coordinator.route import Route
from core.coordinator.service import RouteService
from core.coordinator.session import Session
from core.node.stage_loader import StageLoader
from core.runtime.stage import Stage
from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster_in_memory import MemoryCluster
from core.trust.state_dir import StateDir

PROMPT = tuple(range(40, 60))
TOKENS = 24


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=6, endless=True)


@pytest.fixture(scope="session")
def prompt() -> tuple[int, ...]:
    return PROMPT


@pytest.fixture(scope="session")
def oracle(model: Path) -> str:
    """What transformers makes of the prompt, greedily, in `TOKENS` tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = reference.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False)[0, len(PROMPT) :]
    text: str = AutoTokenizer.from_pretrained(model).decode(ids)
    return text


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    """Where a host keeps its key and its register."""
    return StateDir.open(tmp_path / "host")


@pytest.fixture
def clock() -> MockClock:
    """Runs as a real one does, and can be put forward."""
    return MockClock(rate=1.0)


class Gate:
    """While it is closed, batches wait in front of the stages. `arrived` counts them, `waiting` says if one waits."""

    def __init__(self) -> None:
        self.arrived = 0
        self.waiting = False
        self._last = sys.maxsize
        self._open = threading.Event()

    def close_after(self, batches: int) -> None:
        """Lets so many more pass."""
        self._open.clear()
        self._last = self.arrived + batches

    def open(self) -> None:
        self._last = sys.maxsize
        self._open.set()

    def pass_through(self) -> None:
        self.arrived += 1
        if self.arrived > self._last:
            self.waiting = True
            assert self._open.wait(300)
            self.waiting = False


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, run = Gate(), Stage.run

    def gated(*args: Any, **kwargs: Any) -> torch.Tensor:
        gate.pass_through()
        return run(*args, **kwargs)

    monkeypatch.setattr(Stage, "run", gated)
    yield gate
    gate.open()


class Inside:
    """What the coordinator keeps to itself."""

    def __init__(self, cluster: MemoryCluster) -> None:
        live = cluster.coordinator._live
        assert live is not None
        assert live.generator is not None
        assert live.supervisor is not None
        self.generator = live.generator
        self.router = live.generator.router
        self.supervisor = live.supervisor
        self.members = live.members

    @property
    def service(self) -> RouteService:
        """That of the route which serves."""
        serving = self.router.serving
        assert serving is not None
        return serving

    @property
    def route(self) -> Route:
        return self.service.route

    @property
    def running(self) -> dict[int, Session]:
        """The sessions on the route that serves."""
        return self.service.admission.running

    @property
    def waiting(self) -> list[Session]:
        """Those on none."""
        return self.router.queue.sessions


@pytest.fixture
def inside() -> type[Inside]:
    return Inside


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """Every stage that a node loads, as it comes."""
    made: list[Stage] = []
    begin = Stage.__init__

    def noted(stage: Stage, *args: Any, **kwargs: Any) -> None:
        begin(stage, *args, **kwargs)
        made.append(stage)

    monkeypatch.setattr(Stage, "__init__", noted)
    return made


class Loading:
    """While it is held up, nodes read no layers."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def hold(self) -> None:
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        assert self._open.wait(300)


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loading]:
    loading, load = Loading(), StageLoader.load

    def held_up(*args: Any, **kwargs: Any) -> Any:
        loading.pass_through()
        return load(*args, **kwargs)

    monkeypatch.setattr(StageLoader, "load", held_up)
    yield loading
    loading.go_on()
