"""What shapes one session's draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
