"""From logits to the next token: greedy, or drawn after temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import StageError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy; `top_k` 0 keeps all; `seed` None draws differently each time."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


class Sampler:
    """Picks the tokens of one session. The same seed and logits give the same tokens, on whatever device they are."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator(device="cpu")
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % 2**64)

    def __call__(self, logits: Tensor) -> int:
        """The next token, from logits float32 [vocab]. Raises StageError where one isn't finite."""
        require_finite(logits)
        if self._params.temperature == 0:
            return int(logits.argmax())
        ids, probabilities = self.distribution(logits)
        mass = probabilities.cumsum(0)
        drawn = torch.rand(1, generator=self._generator, dtype=torch.float64) * mass[-1]
        return int(ids[torch.searchsorted(mass, drawn, right=True)])

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that a temperature above 0 may draw, int64 [n], and their probabilities, float64 [n], on the CPU.

        Top-k keeps every token that equals the k-th; top-p then keeps the smallest set whose mass reaches it (nucleus
        sampling, Holtzman et al., arXiv:1904.09751). What is left is scaled to a sum of 1.
        """
        ids, kept = _top_k(logits, self._params.top_k)
        scaled = (kept.double() - kept.max()) / self._params.temperature
        return _nucleus(ids, scaled.softmax(0), self._params.top_p)


def require_finite(logits: Tensor) -> None:
    """Raises StageError where a logit, in a tensor of any shape, is NaN or infinite."""
    finite = int(logits.isfinite().sum())
    if finite < logits.numel():
        raise StageError(
            "the model's logits are not finite",
            f"{logits.numel() - finite} of {logits.numel()} are NaN or infinite",
            "choose a compute dtype with more range: bf16 or fp32",
        )


def _top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids in ascending order, so that the draw does not depend on how a device orders equal logits."""
    if not 0 < k < len(logits):
        return torch.arange(len(logits)), logits.cpu()
    ids = (logits >= logits.topk(k).values[-1]).nonzero().squeeze(1)
    return ids.cpu(), logits[ids].cpu()


def _nucleus(ids: Tensor, probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Sorts only what may be kept: all tokens below half an equal share of 1 - top_p together weigh less than that."""
    if top_p >= 1:
        return ids, probabilities
    candidates = (probabilities >= 0.5 * (1 - top_p) / len(ids)).nonzero().squeeze(1)
    ordered, order = probabilities[candidates].sort(descending=True)
    size = min(1 + int((ordered.cumsum(0) < top_p).sum()), len(ordered))
    kept = ordered[:size]
    return ids[candidates[order[:size]]], kept / kept.sum()
