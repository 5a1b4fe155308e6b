"""Prompts become tokens in a few threads, fairly, and not at all if they are far too long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from core.coordinator import preparation
from core.coordinator.preparation import Preparation
from core.errors import Overloaded, RequestError
from core.interfaces.engine import Conversation, GenerationRequest
from core.testing.cluster_in_memory import memory_cluster

SECONDS = 300


class Work:
    """Runs until it may end; `running` and `most` count those that do so at once."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: list[str] = []
        self.running = self.most = 0
        self._lock = threading.Lock()
        self._may_end = threading.Event()

    def __call__(self, client: str) -> None:
        with self._lock:
            self.begun.append(client)
            self.running += 1
            self.most = max(self.most, self.running)
        self._may_end.wait(SECONDS)
        with self._lock:
            self.running -= 1
            self.done.append(client)

    def end(self) -> None:
        self._may_end.set()


@pytest.fixture
def work() -> Work:
    return Work()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.lowlevel.checkpoint()


async def test_a_client_with_many_prompts_has_one_thread(work: Work) -> None:
    prepared = Preparation()
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for client in ("greedy", "greedy", "greedy", "modest"):
                nursery.start_soon(prepared.run, client, work, client)
            await until(lambda: work.running == 2)
            await wait_all_tasks_blocked()
            assert sorted(work.begun) == ["greedy", "modest"]
            work.end()
    assert work.most == 2
    assert sorted(work.done) == ["greedy"] * 3 + ["modest"]


async def test_whoever_goes_counts_until_its_thread_has_ended(work: Work) -> None:
    prepared = Preparation()
    with trio.fail_after(SECONDS):
        for _ in range(3):
            with trio.move_on_after(0.05):
                await prepared.run("gone", work, "gone")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prepared.run, "modest", work, "modest")
            await until(lambda: work.running == 2)
            work.end()
        await prepared.run("gone", work, "again")
    assert (work.most, work.done.count("gone")) == (2, 1)


async def test_too_many_are_told_so(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "MAX_PREPARING", 3)
    prepared = Preparation()
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for client in "abc":
                nursery.start_soon(prepared.run, client, work, client)
            await wait_all_tasks_blocked()
            with pytest.raises(Overloaded, match="3 requests wait"):
                await prepared.run("d", work, "d")
            work.end()
        await prepared.run("d", work, "d")


TEXT = "machine " * 500_000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [TEXT]}}}
TOOL = {"type": "function", "function": {"name": "f", "description": TEXT, "parameters": {}}}
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "prompt",
    [
        TEXT,
        Conversation(({"role": "user", "content": TEXT},)),
        Conversation((USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, USER)),
        Conversation((USER,), tools=(TOOL,)),
    ],
    ids=["text", "message", "call", "tool"],
)
async def test_a_prompt_that_is_far_too_long_is_tried_in_part(
    model: Path, inside: object, monkeypatch: pytest.MonkeyPatch, prompt: str | Conversation
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a") as cluster:
            await cluster.ready()
            tokenizer = inside(cluster).generator.tokenizer  # type: ignore[operator]
            seen: list[int] = []
            encode = type(tokenizer).encode

            def noting(tokens: object, text: str, **options: bool) -> list[int]:
                seen.append(len(text))
                return encode(tokens, text, **options)  # type: ignore[arg-type]

            monkeypatch.setattr(type(tokenizer), "encode", noting)
            with pytest.raises(RequestError, match=r"maximum context length.*letters of the prompt alone are"):
                async with cluster.coordinator.generate(GenerationRequest(prompt)):
                    pass
            assert seen
            assert max(seen) < len(TEXT) / 10
