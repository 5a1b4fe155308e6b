"""Tokens drawn from many rows of logits at once, on a device with float64, in passes over all of them.

What is kept, and how likely it is to be drawn, is as `core.runtime.sample_cpu` has it for one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.runtime.sample_cpu import TINY
from core.runtime.sampling_params import SamplingParams


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """One token of each row of logits float32 [n, vocab]."""
    mass = weigh(logits, params).cumsum(1, dtype=torch.float64)
    drawn: list[int] = torch.searchsorted(mass, _column(uniforms, mass) * mass[:, -1:], right=True)[:, 0].tolist()
    return drawn


def weigh(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """float32 [n, vocab]: weights in proportion to the row's likeliest token, 0 for what can't be drawn."""
    temperatures = _column([max(each.temperature, TINY) for each in params], logits, torch.float32)
    weights = (logits - logits.amax(1, keepdim=True)).div_(temperatures).exp_()
    if any(each.truncates for each in params):
        _keep_likeliest(weights, params)
    if any(each.min_p for each in params):
        weights.masked_fill_(weights < _column([each.min_p for each in params], weights, torch.float32), 0)
    return weights


def _keep_likeliest(weights: Tensor, params: Sequence[SamplingParams]) -> None:
    """Sets to 0 what top-k and top-p leave out."""
    last = weights.shape[1] - 1
    ordered = weights.sort(dim=1, descending=True).values
    ranks = [min(each.top_k - 1, last) if each.top_k > 0 else last for each in params]
    floor = ordered.gather(1, _column(ranks, weights, torch.int64))
    ordered.masked_fill_(ordered < floor, 0)
    mass = ordered.cumsum(1, dtype=torch.float64)
    top_p = _column([each.top_p if each.top_p < 1 else torch.inf for each in params], mass)
    cut = torch.searchsorted(mass, top_p * mass[:, -1:]).clamp_(max=last)
    floor = torch.maximum(floor, ordered.gather(1, cut))
    weights.masked_fill_(weights < floor, 0)
    tied = (cut < last) & (top_p < 1) & (ordered.gather(1, (cut + 1).clamp_(max=last)) == floor)
    for row in tied.nonzero()[:, 0].tolist():
        above = int((weights[row] > floor[row]).sum())
        equals = (weights[row] == floor[row]).nonzero()[:, 0]
        weights[row, equals[int(cut[row]) + 1 - above :]] = 0


def _column(values: Sequence[float], rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=rows.device)[:, None]
