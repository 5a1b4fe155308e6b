"""Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, arXiv:2412.06464), behind a short convolution.

A layer keeps one matrix per head, whatever the number of tokens: each token turns it a little, and reads from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core.blocks.linear import linear_tensors
from core.blocks.norm import RMSNorm
from core.blocks.rope import Rotation
from core.blocks.shape import DecoderShape, Delta
from core.errors import StageError
from core.interfaces.architecture import SNAPSHOT_TOKENS, Batch, BatchSegment, CacheSize, TensorSpec, Weights

_CHUNK = 64
"""Tokens whose turns are summed up in one triangular system."""
_EPS = 1e-6


class GatedDelta:
    """In attention's place."""

    def __init__(self, shape: DecoderShape, delta: Delta, layer: int, weights: Weights) -> None:
        prefix = _prefix(layer)
        self.delta, self.key = delta, f"delta.{layer}"
        self.inner = weights.linear(*(f"{prefix}.{name}" for name in _inner(delta)))
        self.gates = weights.linear(*(f"{prefix}.{name}" for name in _gates(delta)))
        self.kernel = weights.tensor(f"{prefix}.conv1d.weight")[:, 0].float()
        self.decay = -weights.tensor(f"{prefix}.A_log").exp()
        self.dt_bias = weights.tensor(f"{prefix}.dt_bias")
        self.norm = RMSNorm(weights.tensor(f"{prefix}.norm.weight"), shape.norm_eps)
        self.out = weights.linear(f"{prefix}.out_proj")

    @staticmethod
    def tensors(shape: DecoderShape, delta: Delta, layer: int) -> tuple[TensorSpec, ...]:
        prefix, hidden = _prefix(layer), shape.hidden_size
        rows = {**_inner(delta), **_gates(delta)}
        return (
            *(spec for name in rows for spec in linear_tensors(f"{prefix}.{name}", rows[name], hidden)),
            TensorSpec(f"{prefix}.conv1d.weight", (delta.mixed, 1, delta.kernel)),
            *(TensorSpec(f"{prefix}.{name}", (delta.value_heads,), fp32=True) for name in ("A_log", "dt_bias")),
            TensorSpec(f"{prefix}.norm.weight", (delta.value_dim,)),
            *linear_tensors(f"{prefix}.out_proj", hidden, delta.values),
        )

    @staticmethod
    def cache(delta: Delta) -> CacheSize:
        """Twice, for the snapshot."""
        recurrent = delta.value_heads * delta.key_dim * delta.value_dim
        return CacheSize(0, state_values=2 * (delta.kernel - 1) * delta.mixed, state_fp32_values=2 * recurrent)

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, hidden] -> what is convolved [rows, mixed], the output's gate [rows, values], and each head's learning
        rate and step [rows, 2 * value heads]."""
        inner, gates = self.inner(x), self.gates(x)
        if self.delta.grouped:
            return _ungrouped(inner, gates, self.delta)
        mixed, z = torch.split_with_sizes(inner, (self.delta.mixed, self.delta.values), dim=-1)
        return mixed, z, gates

    def attend(self, batch: Batch, mixed: Tensor, z: Tensor, gates: Tensor) -> Tensor:
        """[rows, values], for `out`."""
        rates, steps = gates.float().chunk(2, dim=-1)
        decays, rates = self.decay * F.softplus(steps + self.dt_bias), rates.sigmoid()
        parts = [self._read(each, mixed[each.rows], decays[each.rows], rates[each.rows]) for each in batch.segments]
        read = parts[0] if len(parts) == 1 else torch.cat(parts)
        gated = self.norm(read.to(mixed.dtype)) * F.silu(z.float()).view_as(read)
        return gated.to(mixed.dtype).flatten(1)

    def _read(self, segment: BatchSegment, mixed: Tensor, decays: Tensor, rates: Tensor) -> Tensor:
        """One session's rows, through its state: float32 [rows, value heads, value dim]."""
        delta, rows = self.delta, len(mixed)
        state = DeltaState.of(segment, self.key)
        before = state.at(segment.start, mixed, delta)
        inputs = torch.cat((before.inputs, mixed))
        convolved = F.silu((inputs.float().unfold(0, delta.kernel, 1) * self.kernel).sum(-1)).to(mixed.dtype).float()
        keys = delta.key_heads * delta.key_dim
        q, k, v = torch.split_with_sizes(convolved, (keys, keys, delta.values), dim=-1)
        q, k = (_normal(_heads(each, delta.key_heads, delta.value_heads)) for each in (q, k))
        turns = _Turns(q * delta.key_dim**-0.5, k, _heads(v, delta.value_heads, delta.value_heads), decays.T, rates.T)
        read, recurrent = _one(turns, before.recurrent) if rows == 1 else _many(turns, before.recurrent)
        state.advance(Moment(segment.start + rows, inputs[rows:].clone(), recurrent), rows)
        return read.transpose(0, 1)


class Moment(NamedTuple):
    """What a layer keeps behind the first `tokens` of a session. It is never changed, so several may share it."""

    tokens: int
    inputs: Tensor
    """The last ones of the convolution: [kernel - 1, mixed]."""
    recurrent: Tensor
    """Float32 [value heads, key dim, value dim]."""

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.recurrent.nbytes


@dataclass
class DeltaState:
    """The SessionState of one layer: behind all tokens, and behind the last chunk that a snapshot was taken of."""

    now: Moment | None = None
    snapshot: Moment | None = None

    @classmethod
    def of(cls, segment: BatchSegment, key: str) -> DeltaState:
        state = segment.state.get(key) if segment.start > 0 else None
        if not isinstance(state, DeltaState):
            state = segment.state[key] = cls()
        return state

    @property
    def nbytes(self) -> int:
        return sum(moment.nbytes for moment in (self.now, self.snapshot) if moment is not None)

    def prefix(self, length: int) -> DeltaState:
        return DeltaState(self._behind(length), self.snapshot)

    def at(self, start: int, like: Tensor, delta: Delta) -> Moment:
        """Raises StageError if it is kept neither now nor in the snapshot."""
        if start > 0:
            return self._behind(start)
        recurrent = like.new_zeros(delta.value_heads, delta.key_dim, delta.value_dim, dtype=torch.float32)
        return Moment(0, like.new_zeros(delta.kernel - 1, delta.mixed), recurrent)

    def advance(self, moment: Moment, rows: int) -> None:
        self.now = moment
        if rows > 1 and moment.tokens % SNAPSHOT_TOKENS == 0:
            self.snapshot = moment

    def _behind(self, tokens: int) -> Moment:
        for moment in (self.now, self.snapshot):
            if moment is not None and moment.tokens == tokens:
                return moment
        raise StageError(
            f"these layers can't go back to position {tokens}",
            "they keep a sum over all that they have seen, and no snapshot of it there",
            "start the session again from its first token",
        )


class _Turns(NamedTuple):
    """By head: queries, keys, values [heads, rows, dim]; decays, as logarithms, and learning rates [heads, rows]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decays: Tensor
    rates: Tensor


def _one(turns: _Turns, state: Tensor) -> tuple[Tensor, Tensor]:
    """What one row reads, [heads, 1, dim], and the state after it."""
    q, k, v, decays, rates = turns
    state = state * decays.exp()[..., None]
    state.baddbmm_(k.mT, (v - k @ state) * rates[..., None])
    return q @ state, state


def _many(turns: _Turns, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same of any number of rows, chunk after chunk."""
    read = []
    for chunk in zip(*(torch.split(each, _CHUNK, dim=1) for each in turns), strict=True):
        results, state = _chunk(_Turns(*chunk), state)
        read.append(results)
    return torch.cat(read, dim=1), state


def _chunk(turns: _Turns, state: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's turn depends on those before it in the chunk: a triangular system says how (the WY representation)."""
    q, k, v, decays, rates = turns
    since = decays.cumsum(-1)
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    between = (since[..., None] - since[:, None]).masked_fill(later, -torch.inf).exp()
    learnt = k * rates[..., None]
    wanted = torch.cat((v * rates[..., None], learnt * since.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular((learnt @ k.mT) * between, wanted, upper=False, unitriangular=True)
    values, keys = torch.split_with_sizes(solved, (v.shape[-1], k.shape[-1]), dim=-1)
    new = values - keys @ state
    read = (q * since.exp()[..., None]) @ state + ((q @ k.mT) * between) @ new
    last = since[:, -1:]
    state = state * last.exp()[..., None] + (k * (last - since).exp()[..., None]).mT @ new
    return read, state


def _heads(x: Tensor, heads: int, wanted: int) -> Tensor:
    """[rows, heads * dim] -> [wanted heads, rows, dim]: each of `heads` serves as many that follow each other."""
    return x.view(len(x), heads, -1).transpose(0, 1).repeat_interleave(wanted // heads, dim=0)


def _normal(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _EPS)


def _inner(delta: Delta) -> dict[str, int]:
    if delta.grouped:
        return {"in_proj_qkvz": delta.mixed + delta.values}
    return {"in_proj_qkv": delta.mixed, "in_proj_z": delta.values}


def _gates(delta: Delta) -> dict[str, int]:
    if delta.grouped:
        return {"in_proj_ba": 2 * delta.value_heads}
    return {"in_proj_b": delta.value_heads, "in_proj_a": delta.value_heads}


def _ungrouped(inner: Tensor, gates: Tensor, delta: Delta) -> tuple[Tensor, Tensor, Tensor]:
    """From one group for each key head to one for each kind."""
    rows, shared = len(inner), delta.value_heads // delta.key_heads
    sizes = (delta.key_dim, delta.key_dim, shared * delta.value_dim, shared * delta.value_dim)
    q, k, v, z = _by_kind(inner.view(rows, delta.key_heads, -1), sizes)
    rates, steps = _by_kind(gates.view(rows, delta.key_heads, -1), (shared, shared))
    return torch.cat((q, k, v), dim=-1), z, torch.cat((rates, steps), dim=-1)


def _by_kind(grouped: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [part.flatten(1) for part in torch.split_with_sizes(grouped, sizes, dim=-1)]


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.linear_attn"
