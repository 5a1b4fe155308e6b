"""The coordinator's share of the compute: embedding, final norm, head, sampling, text. Runs in the compute thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.coordinator.batch import Entry, Outcome
from core.errors import CoreError, StageError, WrongAnswer
from core.interfaces.architecture import EmbedAndHead
from core.interfaces.engine import TokenLogprob
from core.protocol.fields import Tensor
from core.protocol.tensors import from_wire, to_wire
from core.runtime.logprobs import Scored, score, score_rows
from core.runtime.sampling import choose, finite_rows, require_finite
from core.runtime.tokenizer import Tokenizer

HEAD_FAILED = "the coordinator's head failed"
_TRIES = 4


class Head:
    def __init__(
        self, embed_and_head: EmbedAndHead, width: int, device: torch.device, wire: torch.dtype, tokenizer: Tokenizer
    ) -> None:
        self._embed_and_head = embed_and_head
        self._width = width
        self._device = device
        self._wire = wire
        self._tokenizer = tokenizer

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), hidden_size] as it goes on the wire."""
        hidden = self._embed_and_head.embed(torch.tensor(tokens, dtype=torch.int64, device=self._device))
        return to_wire(hidden, self._wire)

    @torch.inference_mode()
    def seconds(self) -> float:
        """What embedding and logits take for one token: the least of a few tries."""
        tries = []
        for _ in range(_TRIES):
            started = time.perf_counter()
            float(self._embed_and_head.logits(from_wire(self.embed([0])).to(self._device)).sum())
            tries.append(time.perf_counter() - started)
        return min(tries)

    def check(self, hidden: Tensor, node: str) -> None:
        """Raises StageError for what a session could not go on from: with no finite logits, or the doing of `node`."""
        try:
            rows = self._rows(hidden, 1)
        except CoreError as error:
            raise StageError(error.title, error.message, node=node) from error
        _refuse_non_finite(rows, node)
        require_finite(self._embed_and_head.logits(rows))

    @torch.inference_mode()
    def step(self, hidden: Tensor, entries: Sequence[Entry], node: str) -> list[Outcome]:
        """Samples what the batch of `entries` brought. `hidden`, which came from `node`, has the rows that they want
        back, in order.

        Raises StageError where it isn't hidden states of this model, and WrongAnswer if they are not finite; what is
        wrong with one session is its outcome's.
        """
        rows = self._rows(hidden, sum(entry.outputs for entry in entries))
        outcomes = [Outcome(entry) for entry in entries]
        sampled: list[tuple[Outcome, torch.Tensor]] = []
        start = 0
        for outcome in outcomes:
            own = rows[start : start + outcome.entry.outputs]
            start += outcome.entry.outputs
            if outcome.entry.session.wants_prompt_logprobs:
                _refuse_non_finite(own, node)
                self._read_prompt(outcome, own)
                own = own[-1:]
            if _samples(outcome.entry):
                sampled.append((outcome, own))
        if sampled:
            self._sample(sampled, node)
        return outcomes

    def _rows(self, hidden: Tensor, rows: int) -> torch.Tensor:
        if hidden.width != self._width or hidden.rows != rows:
            raise StageError(
                f"hidden states of {hidden.rows} x {hidden.width} came back", f"not {rows} x {self._width}"
            )
        return from_wire(hidden).to(self._device) if rows else torch.empty(0, self._width, device=self._device)

    def _sample(self, sampled: list[tuple[Outcome, torch.Tensor]], node: str) -> None:
        hidden = torch.cat([rows for _, rows in sampled]) if len(sampled) > 1 else sampled[0][1]
        logits = self._embed_and_head.logits(hidden)
        finite = finite_rows(logits)
        if not all(finite):
            _refuse_non_finite(hidden, node)
        verifying: list[_Verification] = []
        start = 0
        for outcome, rows in sampled:
            own = range(start, start + len(rows))
            start = own.stop
            if all(finite[row] for row in own):
                verifying.append(_Verification(outcome, own))
            else:
                outcome.error = StageError(
                    "the model's logits are not finite", hint="choose a compute dtype with more range: bf16 or fp32"
                )
        while verifying:
            self._sample_one_each(logits, verifying)
            verifying = [each for each in verifying if each.goes_on()]

    def _sample_one_each(self, logits: torch.Tensor, verifying: list[_Verification]) -> None:
        """The next row of each session, all in one draw."""
        these = logits if len(verifying) == len(logits) else logits[[each.row for each in verifying]]
        decodings = [each.outcome.entry.session.decoding for each in verifying]
        tokens = choose(these, [each.sampler for each in decodings], [each.decoded for each in decodings])
        for index, (each, token) in enumerate(zip(verifying, tokens, strict=True)):
            asked = decodings[index].logprobs
            if asked is not None:
                each.outcome.logprobs += self._told(score(these[index : index + 1], [token], asked))
            each.take(token)

    def _read_prompt(self, outcome: Outcome, rows: torch.Tensor) -> None:
        """The log probability of each prompt token that a row predicts."""
        entry, tokens = outcome.entry, outcome.entry.session.tokens
        asked = entry.session.decoding.prompt_logprobs_asked
        assert asked is not None
        first = [Scored(tokens[0], None)] if entry.start == 0 else []
        predicted = tokens[entry.start + 1 : entry.start + 1 + len(rows)]
        scored = score_rows(rows, predicted, asked, self._embed_and_head.logits)
        outcome.prompt_logprobs = self._told([*first, *scored])

    def _told(self, scored: Sequence[Scored]) -> list[TokenLogprob]:
        return [each.told(self._tokenizer) for each in scored]


@dataclass(slots=True)
class _Verification:
    """A session's rows of logits: the first follows its last token, each other one a draft, if that comes true."""

    outcome: Outcome
    rows: range
    taken: int = 0

    @property
    def row(self) -> int:
        return self.rows[self.taken]

    def take(self, token: int) -> None:
        try:
            text, self.outcome.finish = self.outcome.entry.session.decoding.take(token)
        except StageError as error:
            self.outcome.error = error
            return
        self.outcome.text += text
        self.outcome.tokens.append(token)
        self.taken += 1

    def goes_on(self) -> bool:
        """Whether the next row's draft is the token that was sampled."""
        entry = self.outcome.entry
        if self.outcome.finish is not None or self.outcome.error is not None or self.taken > entry.drafts:
            return False
        return entry.tokens[len(entry.tokens) - entry.drafts + self.taken - 1] == self.outcome.tokens[-1]


def _refuse_non_finite(hidden: torch.Tensor, node: str) -> None:
    """A node sends no such thing by mistake: its stage looks at what it computed."""
    if not torch.isfinite(hidden).all():
        raise WrongAnswer("hidden states came back that are not finite", f"from node {node!r}", node=node)


def _samples(entry: Entry) -> bool:
    return entry.outputs > 0 and entry.is_last and entry.session.decoding.max_tokens > 0
