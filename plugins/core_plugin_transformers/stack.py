"""A layer range and the coordinator's ends, computed by the family's own code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core import Batch, BatchSegment, StageError
from core_plugin_transformers.session import Session
from core_plugin_transformers.skeleton import Skeleton, hidden_argument

KEY = "transformers"
"""The name of this architecture's state among a session's."""

CONTINUE = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "inkling_text",
        "lara_mini",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    }
)
"""Recurrent families whose code takes several rows on from a state (benchmarks/_families.py shows it).

Others begin anew where they get more than one row, so a later chunk of a prompt goes through them row by row.
"""


class Stack:
    """`layers` of a skeleton that holds their weights."""

    def __init__(self, skeleton: Skeleton, layers: range) -> None:
        self._skeleton = skeleton
        self._layers = layers
        self._entering: Tensor | None = None
        self._leaving: Tensor | None = None
        if layers.start > 0:
            skeleton.layers[layers.start].register_forward_pre_hook(self._enter, with_kwargs=True)
        skeleton.layers[layers.stop - 1].register_forward_hook(self._leave)

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        results = [
            self._run(hidden[segment.rows], batch.positions[segment.rows], segment) for segment in batch.segments
        ]
        return torch.cat(results).to(hidden.dtype)

    def _run(self, hidden: Tensor, positions: Tensor, segment: BatchSegment) -> Tensor:
        session = segment.state.get(KEY) if segment.start > 0 else None
        if not isinstance(session, Session):
            session = Session(self._skeleton.config, self._layers)
            segment.state[KEY] = session
        session.begin(segment.start)
        whole = segment.start == 0 or not session.is_recurrent or self._skeleton.config.model_type in CONTINUE
        step = len(hidden) if whole else 1
        rows = torch.split(hidden.to(self._skeleton.dtype), step)
        starts = range(segment.start, segment.start + len(hidden), step)
        passes = zip(rows, torch.split(positions, step), starts, strict=True)
        left = torch.cat([self._pass(some, at, start, session) for some, at, start in passes])
        session.commit(segment.start + len(hidden))
        return left

    def _pass(self, hidden: Tensor, positions: Tensor, start: int, session: Session) -> Tensor:
        embeds = hidden if self._layers.start == 0 else self._skeleton.nowhere(hidden)
        self._entering = hidden[None]
        session.expect(start)
        self._skeleton.run(self._skeleton.base, embeds, positions, session.cache)
        left, self._entering, self._leaving = self._leaving, None, None
        if left is None or left.numel() != hidden.numel():
            raise StageError("this family's layers hand on more than one hidden state")
        return left.view_as(hidden)

    def _enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden_argument(args, kwargs)
        if args:
            return (self._entering, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._entering}

    def _leave(self, _: Any, args: Any, result: Any) -> None:
        self._leaving = result[0] if isinstance(result, tuple) else result


class ModelEnds:
    """Embedding, and what follows the last layer, of a skeleton that holds no layers."""

    def __init__(self, skeleton: Skeleton, device: torch.device) -> None:
        self._skeleton = skeleton
        self._device = device

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._skeleton.model.get_input_embeddings()(tokens[None])[0]
        return embedded.to(self._skeleton.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        last: Any = self._skeleton.layers[-1]
        hidden = hidden.to(self._device, self._skeleton.dtype)
        last.result = hidden[None]
        positions = torch.arange(len(hidden), device=self._device)
        ran = self._skeleton.run(self._skeleton.model, self._skeleton.nowhere(hidden), positions)
        last.result = None
        logits: Tensor = ran.logits
        return logits.view(len(hidden), -1).float()
