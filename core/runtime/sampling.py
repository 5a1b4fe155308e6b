"""From logits to the next tokens of many sessions: greedy, or drawn after penalties, temperature and truncation.

The order, in which a session's sampling parameters act on its logits, is that of vLLM's sampler and of transformers'
`generate`: logit bias, repetition penalty, frequency and presence penalty, grammar, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from core.errors import StageError

_TINY = torch.finfo(torch.float32).tiny
_CACHED = 1 << 16
"""Logits whose copies, of which a draw needs a few, stay in a CPU's caches and small blocks of its allocator."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What shapes one session's draws. The defaults change nothing; `temperature` 0 is greedy, `top_k` 0 keeps all.

    `presence_penalty` is taken once from the logits of what was generated, `frequency_penalty` once for each time
    (the OpenAI API). `repetition_penalty` divides the positive logits of what stands in the prompt or was generated,
    and multiplies the negative ones (Keskar et al., arXiv:1909.05858). `min_p` keeps what is at least so likely in
    proportion to the likeliest token (Nguyen et al., arXiv:2407.01082). `logit_bias` is added to the logits of tokens
    that the vocabulary must have. `seed` None draws differently each time.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


class Constraint(Protocol):
    """What a session's tokens must be, beyond being likely."""

    def forbid(self, logits: Tensor) -> None:
        """Sets to -inf, in logits [vocab], those of the tokens that can't come next. Leaves at least one."""

    def accept(self, token: int) -> None: ...


class Sampler:
    """What one session's draws depend on: parameters, seed, and the tokens so far. `choose` reads it."""

    def __init__(
        self, params: SamplingParams, *, prompt: Sequence[int] = (), constraint: Constraint | None = None
    ) -> None:
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self._constraint = constraint
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._penalties = _Penalties(params, prompt) if params.penalises else None

    def accept(self, token: int) -> None:
        """Takes a token into the session's text."""
        if self._penalties is not None:
            self._penalties.accept(token)
        if self._constraint is not None:
            self._constraint.accept(token)

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` may change logits."""
        return bool(self.params.logit_bias) or self._penalties is not None or self._constraint is not None

    def adjust(self, logits: Tensor) -> None:
        """Applies what comes before temperature to this session's logits, float32 [vocab], in place."""
        if self.params.logit_bias:
            logits[self._bias_ids.to(logits.device)] += self._biases.to(logits.device)
        if self._penalties is not None:
            self._penalties.apply(logits)
        if self._constraint is not None:
            self._constraint.forbid(logits)


class _Penalties:
    """The distinct tokens of prompt and completion, and how often each was generated. A step costs their number."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self._ids = torch.tensor(list(self._slots), dtype=torch.int64)
        self._counts = torch.zeros(len(self._ids))

    def accept(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = torch.cat((self._ids, torch.tensor([token])))
            self._counts = torch.cat((self._counts, torch.zeros(1)))
        self._counts[slot] += 1

    def apply(self, logits: Tensor) -> None:
        ids, counts = self._ids.to(logits.device), self._counts.to(logits.device)
        scores, repetition = logits[ids], self._params.repetition_penalty
        scores = torch.where(scores < 0, scores * repetition, scores / repetition)
        scores -= self._params.frequency_penalty * counts
        scores -= self._params.presence_penalty * (counts > 0)
        logits[ids] = scores


@torch.inference_mode()
def choose(logits: Tensor, samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
    """The next token of each of n sessions, from finite logits float32 [n, vocab] on any device; changes nothing.

    `positions` are the tokens' indices in their completions: with the session's seed they alone decide what is drawn
    from given logits, whatever else is in the batch.
    """
    tokens: dict[int, int] = {}
    for rows in _batches([sampler.params for sampler in samplers], logits):
        theirs = [samplers[row] for row in rows]
        scores = _adjusted(_rows(logits, rows), theirs)
        if theirs[0].params.temperature == 0:
            chosen = scores.argmax(1).tolist()
        else:
            weights = weigh(scores, [sampler.params for sampler in theirs])
            chosen = _draw(weights, [uniform(samplers[row].seed, positions[row]) for row in rows])
        tokens.update(zip(rows, chosen, strict=True))
    return [tokens[row] for row in range(len(samplers))]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 52 random bits, a pure function of its arguments: BLAKE2b (RFC 7693) in counter mode."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % 2**64, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 12) * 2.0**-52


def weigh(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """How likely each token is to be drawn after temperature and truncation, in proportion to the likeliest (1).

    From logits [n, vocab] to float32 [n, vocab], on the CPU or a CUDA device; 0 for what can't be drawn. Temperatures
    are above 0.
    """
    logits = logits if logits.is_cuda else logits.cpu()
    temperatures = _column([max(each.temperature, _TINY) for each in params], logits, torch.float32)
    weights = (logits - logits.amax(1, keepdim=True)).div_(temperatures).exp_()
    if any(each.truncates for each in params):
        _keep_likeliest(weights, params)
    if any(each.min_p for each in params):
        weights.masked_fill_(weights < _column([each.min_p for each in params], weights, torch.float32), 0)
    return weights


def finite_rows(logits: Tensor) -> list[bool]:
    """Whether all logits of a row of [n, vocab] are finite, for each row."""
    finite = logits.sum(1).isfinite()
    # A sum may also overflow: only what failed is looked at closely.
    return [bool(fine) or bool(logits[row].isfinite().all()) for row, fine in enumerate(finite.tolist())]


def require_finite(logits: Tensor) -> None:
    """Raises StageError where a logit, in a tensor of any shape, is NaN or infinite."""
    if all(finite_rows(logits.reshape(-1, logits.shape[-1]))):
        return
    finite = int(logits.isfinite().sum())
    raise StageError(
        "the model's logits are not finite",
        f"{logits.numel() - finite} of {logits.numel()} are NaN or infinite",
        "choose a compute dtype with more range: bf16 or fp32",
    )


def _batches(params: Sequence[SamplingParams], logits: Tensor) -> Iterator[list[int]]:
    """The rows that take the same steps. A CPU takes as many at once as its caches hold, others all."""
    at_once = max(1, _CACHED // logits.shape[1]) if logits.is_cpu else len(params)
    alike: dict[tuple[bool, bool], list[int]] = {}
    for row, each in enumerate(params):
        alike.setdefault((each.temperature == 0, each.truncates), []).append(row)
    for rows in alike.values():
        yield from (rows[start : start + at_once] for start in range(0, len(rows), at_once))


def _rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """[len(rows), vocab]; rows that follow each other are not copied."""
    first, end = rows[0], rows[-1] + 1
    return logits[first:end] if end - first == len(rows) else logits[rows]


def _adjusted(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    if not any(sampler.adjusts for sampler in samplers):
        return logits
    logits = logits.clone()
    for row, sampler in zip(logits, samplers, strict=True):
        sampler.adjust(row)
    return logits


def _column(values: Sequence[float], rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=rows.device)[:, None]


def _keep_likeliest(weights: Tensor, params: Sequence[SamplingParams]) -> None:
    """Sets to 0 what top-k and top-p leave out.

    Top-k keeps every token that equals the k-th. Of these, top-p keeps the smallest set whose mass reaches it (nucleus
    sampling, Holtzman et al., arXiv:1904.09751); among equals the lower ids, so that no device's order matters.
    """
    last = weights.shape[1] - 1
    ordered = _descending(weights)
    ranks = [min(each.top_k - 1, last) if each.top_k > 0 else last for each in params]
    floor = ordered.gather(1, _column(ranks, weights, torch.int64))
    if any(each.top_k > 0 for each in params):
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


def _descending(weights: Tensor) -> Tensor:
    """Each row sorted; on a CPU by numpy, whose sort of values alone takes a thirtieth of torch's."""
    if weights.is_cuda:
        return weights.sort(dim=1, descending=True).values
    return torch.from_numpy(np.sort(weights.neg().numpy(), axis=1)).neg_()


def _draw(weights: Tensor, uniforms: Sequence[float]) -> list[int]:
    """The tokens at which the mass of each row's weights, summed up by ascending id, exceeds the uniform's share."""
    mass = weights.cumsum(1, dtype=torch.float64)
    drawn: list[int] = torch.searchsorted(mass, _column(uniforms, mass) * mass[:, -1:], right=True)[:, 0].tolist()
    return drawn
