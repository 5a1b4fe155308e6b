"""A layer range and the coordinator's ends, computed by the family's own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core import Batch, BatchSegment, StageError
from core_plugin_transformers.session import Caches, States, joined, part
from core_plugin_transformers.sharing import share_passes
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
    """`layers` of a skeleton that holds their weights.

    Sessions that decode one row each share a pass, if that has proven to compute what each gets alone.
    """

    def __init__(self, skeleton: Skeleton, layers: range) -> None:
        self._skeleton = skeleton
        self._layers = layers
        self._caches = Caches(skeleton.config, layers)
        self._shares: bool | None = None if self._caches.can_be_joined else False
        self._entering: Tensor | None = None
        self._leaving: Tensor | None = None
        if layers.start > 0:
            skeleton.layers[layers.start].register_forward_pre_hook(self._enter, with_kwargs=True)
        skeleton.layers[layers.stop - 1].register_forward_hook(self._leave)

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        if len(batch.segments) == 1:
            return self._run(hidden, batch)
        left = torch.empty_like(hidden)
        for rows in self._passes(hidden, batch):
            ran = self._run(torch.cat([hidden[each] for each in rows]), batch.part(rows))
            sizes = [each.stop - each.start for each in rows]
            for each, result in zip(rows, torch.split_with_sizes(ran, sizes), strict=True):
                left[each] = result
        return left

    def _passes(self, hidden: Tensor, batch: Batch) -> list[list[slice]]:
        """The rows of each pass: a session's own, or one of each of several."""
        steps = [each.rows for each in batch.segments if each.start > 0 and each.rows.stop == each.rows.start + 1]
        if len(steps) < 2 or not self._share_passes(hidden):
            return [[each.rows] for each in batch.segments]
        return [steps, *([each.rows] for each in batch.segments if each.rows not in steps)]

    def _share_passes(self, like: Tensor) -> bool:
        """Asked when the first sessions meet."""
        if self._shares is None:
            self._shares = share_passes(self._run, like.shape[1], like.device)
        return self._shares

    def _run(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The rows of one session, or one row of each of several."""
        begun = [self._begun(segment) for segment in batch.segments]
        sessions = [states for states in begun if states is not None]
        came = hidden.to(self._skeleton.dtype)
        if sessions and len(came) > len(batch.segments) and batch.segments[0].start > 0 and not self._continues:
            rows = [slice(row, row + 1) for row in range(len(came))]
            left = torch.cat([self._pass(came[row], batch.part([row]), sessions) for row in rows])
        else:
            left = self._pass(came, batch, sessions)
        for segment, states in zip(batch.segments, begun, strict=True):
            if states is not None:
                states.commit(segment.start + segment.rows.stop - segment.rows.start)
        return left.to(hidden.dtype)

    @property
    def _continues(self) -> bool:
        return self._skeleton.config.model_type in CONTINUE

    def _begun(self, segment: BatchSegment) -> States | None:
        """The session's states, of its tokens before the segment; None if it has none."""
        states = self._caches.new_states() if segment.start == 0 else segment.state.get(KEY)
        if not isinstance(states, States):
            return None
        segment.state[KEY] = states
        states.begin(segment.start)
        return states

    def _pass(self, hidden: Tensor, batch: Batch, sessions: Sequence[States]) -> Tensor:
        states = joined(sessions) if sessions else {}
        self._entering = hidden.view(len(batch.segments), -1, hidden.shape[-1])
        self._skeleton.run(
            self._skeleton.base,
            self._entering if self._layers.start == 0 else self._skeleton.nowhere(self._entering),
            batch.positions.view(len(batch.segments), -1),
            self._caches.of(batch, states),
            _mask(batch) if self._caches.any_attends else None,
        )
        left, self._entering, self._leaving = self._leaving, None, None
        if left is None or left.numel() != hidden.numel():
            raise StageError("this family's layers hand on more than one hidden state")
        if len(sessions) > 1:
            part(states, sessions)
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
        ran = self._skeleton.run(self._skeleton.model, self._skeleton.nowhere(hidden[None]), positions[None])
        last.result = None
        logits: Tensor = ran.logits
        return logits.view(len(hidden), -1).float()


def _mask(batch: Batch) -> Tensor | None:
    """int64 [sessions, tokens of the longest]: 0 before each one's first token; None for a session alone."""
    if len(batch.segments) == 1:
        return None
    lengths = batch.positions + 1
    tokens = torch.arange(max(segment.start for segment in batch.segments) + 1, device=lengths.device)
    return (tokens >= len(tokens) - lengths[:, None]).long()
