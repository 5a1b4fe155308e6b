"""House rules: real processes and sockets on loopback, every wait with a deadline, no process left over.

Greedy text is held against transformers on the same checkpoint. Where the two part, the oracle's own choice must
have been a toss-up: its two best logits closer than rounding can tell apart.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster import Cluster, open_cluster
from core.testing.fork_server import fork_server

NEAR_TIE = 1e-3
CHARACTER_TOKENS = 4
"""A character of several tokens is U+FFFD until the last of them has come."""


class Oracle:
    """transformers on the checkpoint that the cluster serves."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._greedy: dict[tuple[tuple[int, ...], int], tuple[list[int], list[float]]] = {}

    @classmethod
    def of(cls, path: Path) -> Oracle:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return cls(model, AutoTokenizer.from_pretrained(path))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def greedy(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """The tokens, and how far the best logit was ahead of the second at each."""
        asked = (tuple(prompt), max_tokens)
        if asked not in self._greedy:
            self._greedy[asked] = self._generate(prompt, max_tokens)
        return self._greedy[asked]

    def _generate(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        with torch.inference_mode():
            found = self._model.generate(
                torch.tensor([prompt]),
                max_new_tokens=max_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.cat(found.logits).float().topk(2).values
        return found.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()

    def check(self, text: str, prompt: list[int], max_tokens: int) -> None:
        """Asserts that `text` is the greedy answer to `prompt`, or leaves it only where that is a toss-up."""
        tokens, margins = self.greedy(prompt, max_tokens)
        expected = self.decode(tokens)
        if text == expected:
            return
        agreed = range(len(tokens) + 1)
        parting = next(
            (n for n in agreed if not text.startswith(self.decode(tokens[:n]).rstrip("\ufffd"))), len(tokens)
        )
        near = min(margins[max(0, parting - CHARACTER_TOKENS) : parting], default=0.0)
        assert near < NEAR_TIE, f"{text!r} is not {expected!r}: they part at token {parting}, where it leads by {near}"


@pytest.fixture(scope="session", autouse=True)
def forked() -> Iterator[None]:
    with fork_server():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    return Oracle.of(model)


@pytest.fixture(scope="session")
def oracle_of() -> Callable[[Any, Any], Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal("trio") as portal:
        yield portal


SharedCluster = Callable[..., AbstractContextManager[Cluster]]
"""open_cluster with `nodes`, ready, in a thread of its own: for fixtures of a wider scope than one test."""


@pytest.fixture(scope="session")
def shared_cluster(portal: BlockingPortal) -> SharedCluster:
    @contextmanager
    def shared(model: Path, *options: str, nodes: Sequence[str]) -> Iterator[Cluster]:
        options += ("--min-nodes", str(len(nodes)))
        with portal.wrap_async_context_manager(open_cluster(model, *options)) as cluster:
            for name in nodes:
                portal.call(cluster.start_node, name)
            portal.call(cluster.wait_ready)
            yield cluster

    return shared


@pytest.fixture(scope="session")
def pair(shared_cluster: SharedCluster, model: Path) -> Iterator[Cluster]:
    """Two nodes that serve `model` in fp32. Tests leave it as they found it."""
    with shared_cluster(
        model, "--dtype", "fp32", "--no-prefix-cache", "--planner", "balanced", nodes=("one", "two")
    ) as cluster:
        yield cluster


Streaming = Callable[..., AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]]
"""An open streamed completion: its events as they come. `max_tokens` and other fields may be given."""


@pytest.fixture(scope="session")
def streaming() -> Streaming:
    @asynccontextmanager
    async def stream(cluster: Cluster, prompt: str, **fields: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        body = {"model": cluster.model, "prompt": prompt, "temperature": 0, "stream": True, **fields}
        async with cluster.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            yield _events(response.aiter_lines())

    return stream


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
