"""From logits to the next tokens of many sessions: greedy, or drawn after penalties, temperature and truncation.

The order, in which a session's sampling parameters act on its logits, is that of vLLM's sampler and of transformers'
`generate`: logit bias, repetition penalty, frequency and presence penalty, grammar, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from core.errors import StageError
from core.runtime import sample_cpu, sample_cuda
from core.runtime.sampling_params import SamplingParams

LARGEST = 1e30
"""What logits become that a penalty takes beyond all numbers: large, and two of them still differ by a number."""


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
        self._counts = torch.zeros(len(self._ids), dtype=torch.float32)

    def accept(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = torch.cat((self._ids, torch.tensor([token])))
            self._counts = torch.cat((self._counts, torch.zeros(1, dtype=torch.float32)))
        self._counts[slot] += 1

    def apply(self, logits: Tensor) -> None:
        ids, counts = self._ids.to(logits.device), self._counts.to(logits.device)
        scores, repetition = logits[ids], self._params.repetition_penalty
        scores = torch.where(scores < 0, scores * repetition, scores / repetition)
        scores -= self._params.frequency_penalty * counts
        scores -= self._params.presence_penalty * (counts > 0)
        logits[ids] = scores.nan_to_num_(nan=0.0, posinf=LARGEST, neginf=-LARGEST)


def choose(logits: Tensor, samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
    """The next token of each of n sessions, from finite logits float32 [n, vocab] on any device; changes nothing.

    `positions` are the tokens' indices in their completions: with the session's seed they alone decide what is drawn
    from given logits, whatever else is in the batch.
    """
    if logits.is_cuda:
        return _choose_together(logits, samplers, positions)
    rows = zip(logits.cpu(), samplers, positions, strict=True)
    return [_choose_one(row, sampler, position) for row, sampler, position in rows]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 52 random bits, a pure function of its arguments: BLAKE2b (RFC 7693) in counter mode."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % 2**64, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 12) * 2.0**-52


def finite_rows(logits: Tensor) -> list[bool]:
    """Whether all logits of a row of [n, vocab] are finite, for each row."""
    # A sum may also overflow: only what failed is looked at closely.
    sums = logits.sum(1).tolist()
    return [math.isfinite(total) or bool(logits[row].isfinite().all()) for row, total in enumerate(sums)]


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


def _choose_one(logits: Tensor, sampler: Sampler, position: int) -> int:
    if sampler.adjusts:
        logits = logits.clone()
        sampler.adjust(logits)
    if sampler.params.temperature == 0:
        return int(logits.numpy().argmax())
    return sample_cpu.draw(logits.numpy(), sampler.params, uniform(sampler.seed, position))


def _choose_together(logits: Tensor, samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
    """In passes over all rows that take the same steps."""
    if any(sampler.adjusts for sampler in samplers):
        logits = logits.clone()
        for row, sampler in zip(logits, samplers, strict=True):
            sampler.adjust(row)
    alike: dict[tuple[bool, bool], list[int]] = {}
    for index, sampler in enumerate(samplers):
        alike.setdefault((sampler.params.temperature == 0, sampler.params.truncates), []).append(index)
    tokens: dict[int, int] = {}
    for (greedy, _), rows in alike.items():
        theirs = logits if len(rows) == len(logits) else logits[rows]
        if greedy:
            chosen = theirs.argmax(1).tolist()
        else:
            uniforms = [uniform(samplers[row].seed, positions[row]) for row in rows]
            chosen = sample_cuda.draw(theirs, [samplers[row].params for row in rows], uniforms)
        tokens.update(zip(rows, chosen, strict=True))
    return [tokens[row] for row in range(len(samplers))]
