"""A stage refuses what it can't compute, names itself, and is as it was for everyone else."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from core.errors import StageError
from core.interfaces.architecture import Batch
from core.runtime.stage import Stage

CPU = torch.device("cpu")
WIDTH = 8
HEADS = 2


class Piece(NamedTuple):
    session: int
    position: int
    rows: int
    outputs: int = 1


def layer_four(hidden: Tensor, batch: Batch) -> Tensor:
    """Caches one value per head and adds one."""
    states = hidden.view(len(hidden), HEADS, -1)
    batch.attend(4, states, states, states, scale=1.0)
    return hidden + 1


def stage(stack: Callable[[Tensor, Batch], Tensor] = layer_four, residual: torch.dtype = torch.float32) -> Stage:
    return Stage(stack, range(4, 5), CPU, residual, nbytes=0)


def rows(count: int) -> Tensor:
    return torch.arange(count * WIDTH, dtype=torch.float32).view(count, WIDTH) / 100


def test_all_rows_pass_on_and_the_last_stage_returns_those_that_are_wanted() -> None:
    pieces = [Piece(1, 0, 4, outputs=1), Piece(2, 0, 3, outputs=2), Piece(3, 0, 2, outputs=0), Piece(4, 0, 1)]
    hidden = rows(10)
    assert torch.equal(stage().run(hidden, pieces, outputs_only=False), hidden + 1)
    assert torch.equal(stage().run(hidden, pieces, outputs_only=True), hidden[[3, 5, 6, 9]] + 1)
    assert stage().run(hidden[:2], [Piece(3, 0, 2, outputs=0)], outputs_only=True).shape == (0, WIDTH)


@pytest.mark.parametrize("arriving", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rows_arrive_in_any_dtype_and_are_computed_in_the_residual_one(arriving: torch.dtype) -> None:
    seen = []

    def note(hidden: Tensor, batch: Batch) -> Tensor:
        seen.append(hidden.dtype)
        return hidden

    stage(note).run(rows(2).to(arriving), [Piece(1, 0, 2)], outputs_only=False)
    assert seen == [torch.float32]


@pytest.mark.parametrize("count", [1, 3])
def test_rows_must_be_as_many_as_the_segments_say(count: int) -> None:
    subject = stage()
    with pytest.raises(StageError, match=f"has {count} rows: its segments count 2"):
        subject.run(rows(count), [Piece(1, 0, 2)], outputs_only=False)
    assert len(subject.caches) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_layers_that_compute_no_finite_numbers_are_named(value: float) -> None:
    def poisoned(hidden: Tensor, batch: Batch) -> Tensor:
        return torch.where(hidden > 0.1, value, hidden)

    with pytest.raises(StageError, match=r"layers \[4, 5\) computed .* not finite.*--dtype bf16 or fp32"):
        stage(poisoned).run(rows(3), [Piece(1, 0, 3)], outputs_only=True)


def test_it_is_said_where_they_came_in_like_that() -> None:
    hidden = rows(3)
    hidden[1, 2] = float("nan")
    with pytest.raises(StageError, match=r"that arrived are not finite.*an earlier stage"):
        stage().run(hidden, [Piece(1, 0, 3)], outputs_only=True)


def test_a_wide_residual_stream_stays_finite() -> None:
    hidden = torch.full((1, WIDTH), 70_000.0)
    assert torch.equal(stage().run(hidden, [Piece(1, 0, 1)], outputs_only=True), hidden + 1)
    with pytest.raises(StageError, match="not finite"):
        stage(residual=torch.float16).run(hidden, [Piece(1, 0, 1)], outputs_only=True)


def test_a_failed_batch_can_be_sent_again() -> None:
    subject = stage()
    subject.run(rows(5), [Piece(1, 0, 5)], outputs_only=False)
    for position, hidden in ((9, rows(1)), (5, rows(1) * float("nan"))):
        with pytest.raises(StageError):
            subject.run(hidden, [Piece(1, position, 1)], outputs_only=False)
        assert subject.caches.tokens == 5
    subject.run(rows(1), [Piece(1, 5, 1)], outputs_only=False)
    assert subject.caches.tokens == 6


def test_a_gap_in_one_session_leaves_the_others_of_the_batch_as_they_were() -> None:
    subject = stage()
    subject.run(rows(5), [Piece(1, 0, 5)], outputs_only=False)
    with pytest.raises(StageError, match="session 2 has 0 tokens"):
        subject.run(rows(3), [Piece(3, 0, 1), Piece(1, 2, 1), Piece(2, 4, 1)], outputs_only=False)
    assert (len(subject.caches), subject.caches.tokens) == (1, 5)
