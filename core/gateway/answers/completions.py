"""The formatter of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.gateway.answers.formatter import DONE, ChoicesFormatter, event
from core.gateway.answers.generations import Outcome, Step
from core.gateway.answers.logprobs import TokenTable
from core.gateway.schemas.common import Usage
from core.gateway.schemas.completions import Completion, CompletionBody, CompletionChoice, CompletionLogprobs
from core.interfaces.engine import Generation, TokenLogprob


class CompletionFormatter(ChoicesFormatter):
    """`echoes` has the text of each prompt, where the choices begin with it."""

    prefix = "cmpl"

    def __init__(self, model: str, body: CompletionBody, choices: int, echoes: Sequence[str]) -> None:
        super().__init__(model, body, choices)
        self._n = body.n
        self._echoes = echoes
        self._logprobs = body.logprobs
        self._tables: dict[int, TokenTable] = {}
        self._begun: set[int] = set()

    def whole(self, outcomes: Sequence[Outcome]) -> Completion:
        choices = [self._choice(index, outcome) for index, outcome in enumerate(outcomes)]
        return self._completion(choices, self.total(outcomes))

    def _choice(self, index: int, outcome: Outcome) -> CompletionChoice:
        echo, tokens = self._echo(index, outcome.generation)
        logprobs = self._list(index, (*tokens, *outcome.logprobs), outcome.generation)
        return CompletionChoice(index, echo + outcome.text, logprobs, outcome.finish_reason)

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def step(self, step: Step) -> Iterator[bytes]:
        index, delta = step.index, step.delta
        self.tally.count(index, step.generation, delta.tokens)
        echo, tokens = ("", ()) if index in self._begun else self._echo(index, step.generation)
        self._begun.add(index)
        text, tokens = echo + delta.text, (*tokens, *delta.logprobs)
        if text or tokens or delta.finish_reason:
            logprobs = self._list(index, tokens, step.generation) if tokens else None
            yield event(self._completion([CompletionChoice(index, text, logprobs, delta.finish_reason)]))

    def closing(self) -> Iterator[bytes]:
        if self.include_usage:
            yield event(self._completion([], self.tally.usage()))
        yield DONE

    def _echo(self, index: int, generation: Generation) -> tuple[str, tuple[TokenLogprob, ...]]:
        return (self._echoes[index // self._n], generation.prompt_logprobs) if self._echoes else ("", ())

    def _list(self, index: int, tokens: Sequence[TokenLogprob], generation: Generation) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        if index not in self._tables:
            self._tables[index] = TokenTable(self._logprobs > 0, self._shift(index, generation))
        return self._tables[index].list(tokens)

    def _shift(self, index: int, generation: Generation) -> int:
        """Where the prompt's first token begins, so that its last one ends where the prompt's text does.

        Tokens may say more than the text: one that begins every prompt, or a space that the tokenizer puts before.
        """
        if not self._echoes:
            return 0
        told = b"".join(token.raw for token in generation.prompt_logprobs).decode(errors="replace")
        return len(self._echoes[index // self._n]) - len(told)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage or self.no_usage()
        )
