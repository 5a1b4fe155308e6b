"""The coordinator's share of the compute: embedding, final norm, head, sampling, text. Runs in the compute thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.errors import StageError
from core.interfaces.architecture import Ends
from core.interfaces.engine import Delta, FinishReason
from core.protocol.messages import Tensor
from core.protocol.tensors import from_wire, to_wire
from core.runtime.sampling import Sampler, choose, require_finite
from core.runtime.tokenizer import TextStream


@dataclass(slots=True)
class Decoding:
    """What one session's decoding has come to."""

    sampler: Sampler
    text: TextStream
    eos_ids: frozenset[int]
    max_tokens: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A decoded token's delta, and the hidden state [1, hidden_size] of the next step (None at the end)."""

    delta: Delta
    hidden: Tensor | None


class Head:
    def __init__(self, ends: Ends, width: int, device: torch.device, wire: torch.dtype) -> None:
        self._ends = ends
        self._width = width
        self._device = device
        self._wire = wire

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), hidden_size] as it goes on the wire."""
        hidden = self._ends.embed(torch.tensor(tokens, dtype=torch.int64, device=self._device))
        return to_wire(hidden, self._wire)

    def check(self, hidden: Tensor) -> None:
        """Raises StageError for what a session could not go on from: not this model's, or with no finite logits."""
        require_finite(self._logits(hidden))

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> torch.Tensor:
        """The logits [1, vocab] of what came back. Raises StageError where it isn't hidden states of this model."""
        if hidden.width != self._width or hidden.rows != 1:
            raise StageError(f"hidden states of {hidden.rows} x {hidden.width} came back", f"not 1 x {self._width}")
        return self._ends.logits(from_wire(hidden).to(self._device))

    def step(self, hidden: Tensor, decoding: Decoding) -> Step:
        """Samples a token from the last row, adds it to the text, and embeds it for the next step."""
        logits = self._logits(hidden)
        require_finite(logits)
        [token] = choose(logits, [decoding.sampler], [decoding.tokens])
        decoding.sampler.accept(token)
        decoding.tokens += 1
        finish: FinishReason | None = None
        text = ""
        if token in decoding.eos_ids:
            finish = "stop"
        else:
            text = decoding.text.push(token)
            if decoding.text.stopped:
                finish = "stop"
            elif decoding.tokens >= decoding.max_tokens:
                finish = "length"
        if finish is not None:
            text += decoding.text.finish()
            finish = "stop" if decoding.text.stopped else finish
        return Step(Delta(text, decoding.tokens, finish), self.embed([token]) if finish is None else None)
