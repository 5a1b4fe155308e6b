"""What shapes one session's draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.errors import ConfigError

ADVISED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


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


def advised(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """How the model's makers advise to draw from it. Raises ConfigError for what is no number.

    `do_sample` false means that they advise against drawing, whatever else they say.
    """
    said = {key: value for key in ADVISED if (value := generation_config.get(key)) is not None}
    for key, value in said.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"the model's generation_config.json says {key} = {value!r}", "it has to be a number")
    return {**said, "temperature": 0.0} if generation_config.get("do_sample") is False else said
