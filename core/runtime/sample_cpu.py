"""One token drawn from one row of logits, on the CPU: numpy's passes over a vocabulary cost a third of torch's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from core.runtime.sampling_params import SamplingParams

TINY = float(np.finfo(np.float32).tiny)
_BLOCK = 512
_BELOW_ONE = 1 - 2.0**-52

Weights = NDArray[np.float32]
Ids = NDArray[np.int64]


def draw(logits: Weights, params: SamplingParams, uniform: float) -> int:
    """The token at which the weights, summed up by ascending id, exceed the share `uniform`, in [0, 1), of them all."""
    ids, weights = weigh(logits, params)
    position = _locate(weights, uniform)
    return position if ids is None else int(ids[position])


def weigh(logits: Weights, params: SamplingParams) -> tuple[Ids | None, Weights]:
    """What may be drawn from logits [vocab] at a temperature above 0: ascending ids (None: all), and their weights.

    A weight is in proportion to the likeliest token's, which is 1. Top-k keeps every token that equals the k-th. Of
    these, top-p keeps the smallest set whose mass reaches it (nucleus sampling, Holtzman et al., arXiv:1904.09751),
    among equals the lower ids.
    """
    ids = None
    if 0 < params.top_k < len(logits):
        rank = len(logits) - params.top_k
        ids = np.flatnonzero(logits >= np.partition(logits, rank)[rank])
        logits = logits[ids]
    weights = logits - logits.max()
    with np.errstate(over="ignore"):
        weights /= max(params.temperature, TINY)
    np.exp(weights, out=weights)
    if params.top_p < 1 or params.min_p > 0:
        kept = _likeliest(weights, params.top_p, params.min_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def _likeliest(weights: Weights, top_p: float, min_p: float) -> Ids:
    total = float(weights.sum(dtype=np.float64))
    if top_p >= 1:
        return np.flatnonzero(weights >= min_p)
    # All that is below half an equal share of 1 - top_p weighs less than that together: top-p leaves it out.
    candidates = np.flatnonzero(weights >= max(min_p, 0.5 * (1 - top_p) * total / len(weights)))
    weights = weights[candidates]
    ordered = np.sort(weights)[::-1]
    size = min(1 + int(np.searchsorted(ordered.cumsum(dtype=np.float64), top_p * total)), len(ordered))
    kept = weights > ordered[size - 1]
    kept[np.flatnonzero(weights == ordered[size - 1])[: size - np.count_nonzero(kept)]] = True
    likeliest: Ids = candidates[kept]
    return likeliest


def _locate(weights: Weights, uniform: float) -> int:
    """Finds the block first, then the place in it: no sums of all weights one by one."""
    if len(weights) <= _BLOCK:
        return _step(weights, uniform)[0]
    block, share = _step(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), uniform)
    return block * _BLOCK + _step(weights[block * _BLOCK : (block + 1) * _BLOCK], share)[0]


def _step(weights: Weights, uniform: float) -> tuple[int, float]:
    """Where the share `uniform` of the mass is exceeded, and the share, in [0, 1), of what stands there."""
    mass = weights.cumsum(dtype=np.float64)
    drawn = uniform * mass[-1]
    place = int(np.searchsorted(mass, drawn, side="right"))
    share = float((drawn - mass[place]) / weights[place]) + 1
    return place, min(max(share, 0.0), _BELOW_ONE)
