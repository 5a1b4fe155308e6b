"""What one session's decoding has come to: from sampled tokens to text, and to the reason for which it ends."""

from __future__ import annotations

from dataclasses import dataclass

from core.coordinator.speculation import Speculation
from core.interfaces.engine import FinishReason
from core.runtime.sampling import Sampler
from core.runtime.tokenizer import TextStream


@dataclass(slots=True)
class Decoding:
    """Belongs to the compute thread while a batch of the session's is in flight, and to trio otherwise.

    Whatever it takes is delivered (core.coordinator.scheduler), so it is never ahead of what the reader is told.

    `stop_ids` end it like a stop string. `bounded`: whether all of `max_tokens` must be had.
    `logprobs` and `prompt_logprobs_asked` as in GenerationRequest. `decoded` counts the tokens taken.
    """

    sampler: Sampler
    text: TextStream
    stop_ids: frozenset[int]
    max_tokens: int
    bounded: bool
    speculation: Speculation
    logprobs: int | None = None
    prompt_logprobs_asked: int | None = None
    decoded: int = 0

    def draft(self, room: int) -> list[int]:
        """What may follow, at most `room` tokens of it; nothing if guessing does not pay."""
        return self.speculation.draft(most=min(room, self.max_tokens - self.decoded - 1))

    def take(self, token: int) -> tuple[str, FinishReason | None]:
        """Adds a sampled token: the text that it makes final, and why nothing follows it."""
        self.decoded += 1
        self.sampler.accept(token)
        self.speculation.extend((token,))
        finish: FinishReason | None = None
        text = ""
        if token in self.stop_ids:
            finish = "stop"
        else:
            text = self.text.push(token)
            if self.text.stop:
                finish = "stop"
            elif self.decoded >= self.max_tokens:
                finish = "length"
        if finish is not None:
            text += self.text.finish()
            finish = "stop" if self.text.stop else finish
        return text, finish
