"""What one session's decoding has come to: from sampled tokens to text, and to the reason for which it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.coordinator.speculation import Speculation
from core.interfaces.engine import FinishReason, TokenLogprob
from core.runtime.sampling import Sampler
from core.runtime.tokenizer import TextStream


@dataclass(slots=True)
class Decoding:
    """`stop_ids` end it like a stop string. `bounded`: whether the client has said what `max_tokens` is.

    `logprobs` and `prompt_logprobs_asked` as in GenerationRequest.
    """

    sampler: Sampler
    text: TextStream
    stop_ids: frozenset[int]
    max_tokens: int
    bounded: bool
    speculation: Speculation
    logprobs: int | None = None
    prompt_logprobs_asked: int | None = None
    tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Until the first token is decoded: all rows of the prompt are wanted back."""
        return self.prompt_logprobs_asked is not None and self.tokens == 0

    def draft(self, tokens: Sequence[int], *, room: int) -> list[int]:
        """What may follow `tokens`, at most `room` of it; nothing where guessing does not pay."""
        return self.speculation.draft(tokens, most=min(room, self.max_tokens - self.tokens - 1))

    def take(self, token: int) -> tuple[str, FinishReason | None]:
        """Adds a sampled token: the text that it makes final, and why nothing follows it."""
        self.tokens += 1
        self.sampler.accept(token)
        finish: FinishReason | None = None
        text = ""
        if token in self.stop_ids:
            finish = "stop"
        else:
            text = self.text.push(token)
            if self.text.stopped:
                finish = "stop"
            elif self.tokens >= self.max_tokens:
                finish = "length"
        if finish is not None:
            text += self.text.finish()
            finish = "stop" if self.text.stopped else finish
        return text, finish
