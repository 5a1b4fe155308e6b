"""Log probabilities of tokens, as the model itself has them: before temperature and whatever else shapes a draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.interfaces.engine import TokenLogprob
from core.runtime.tokenizer import Tokenizer

_ROWS = 32
"""Rows whose logits are held at once: 20 MB of a vocabulary of 150,000."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A token and its log probability (None: nothing predicts it), and the likeliest ones, likeliest first."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()

    def told(self, tokenizer: Tokenizer) -> TokenLogprob:
        """With the text and bytes of each token."""
        top = tuple(_token_logprob(token, logprob, tokenizer) for token, logprob in self.top)
        return _token_logprob(self.token, self.logprob, tokenizer, top)


def score(logits: Tensor, tokens: Sequence[int], most: int) -> list[Scored]:
    """Each row's token and the `most` likeliest ones, from finite logits float32 [len(tokens), vocab]."""
    scored: list[Scored] = []
    for start in range(0, len(tokens), _ROWS):
        scored += _score(logits[start : start + _ROWS], tokens[start : start + _ROWS], most)
    return scored


def score_rows(hidden: Tensor, tokens: Sequence[int], most: int, logits_of: Callable[[Tensor], Tensor]) -> list[Scored]:
    """The same from hidden states [n, hidden_size], n >= len(tokens), with few rows' logits there at once.

    For a prompt's rows, `tokens` are what follows each: all but its first. The last row predicts no token of it.
    """
    hidden = hidden[: len(tokens)]
    scored: list[Scored] = []
    for start in range(0, len(tokens), _ROWS):
        scored += _score(logits_of(hidden[start : start + _ROWS]), tokens[start : start + _ROWS], most)
    return scored


@torch.inference_mode()
def _score(logits: Tensor, tokens: Sequence[int], most: int) -> list[Scored]:
    norm = logits.logsumexp(1, keepdim=True)
    own = (logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None]) - norm)[:, 0].tolist()
    likeliest = logits.topk(min(most, logits.shape[1]))
    tops = zip(likeliest.indices.tolist(), (likeliest.values - norm).tolist(), strict=True)
    return [
        Scored(token, logprob, tuple(zip(ids, logprobs, strict=True)))
        for token, logprob, (ids, logprobs) in zip(tokens, own, tops, strict=True)
    ]


def _token_logprob(
    token: int, logprob: float | None, tokenizer: Tokenizer, top: tuple[TokenLogprob, ...] = ()
) -> TokenLogprob:
    raw = tokenizer.token_bytes(token)
    return TokenLogprob(token, raw.decode(errors="replace"), raw, logprob, top)
