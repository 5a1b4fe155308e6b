"""The wording of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.gateway.answers.generations import Outcome, Step
from core.gateway.answers.wording import DONE, OpenAIWording, event
from core.gateway.schemas.common import Usage
from core.gateway.schemas.completions import Completion, CompletionChoice


class CompletionWording(OpenAIWording):
    prefix = "cmpl"

    def whole(self, outcomes: Sequence[Outcome]) -> Completion:
        choices = [
            CompletionChoice(index, outcome.text, None, outcome.finish_reason) for index, outcome in enumerate(outcomes)
        ]
        return self._completion(choices, self.total(outcomes))

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def step(self, step: Step) -> Iterator[bytes]:
        delta = step.delta
        self.tally.count(step.index, step.generation, delta.tokens)
        if delta.text or delta.finish_reason:
            yield event(self._completion([CompletionChoice(step.index, delta.text, None, delta.finish_reason)]))

    def closing(self) -> Iterator[bytes]:
        if self.include_usage:
            yield event(self._completion([], self.tally.usage()))
        yield DONE

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage or self.no_usage()
        )
