"""House rules: torch's log_softmax of all logits at once is the oracle."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from core.interfaces.engine import TokenLogprob
from core.runtime.logprobs import Scored, score, score_rows
from core.runtime.tokenizer import Tokenizer

VOCAB, WIDTH = 300, 8


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("most", [0, 1, 5])
def test_scores_are_the_oracles(rows: int, most: int) -> None:
    logits = 5 * random(rows, VOCAB)
    tokens = [(7 * row) % VOCAB for row in range(rows)]
    expected = logits.log_softmax(1)
    scored = score(logits, tokens, most)
    assert [each.token for each in scored] == tokens
    found = torch.tensor([each.logprob for each in scored])
    torch.testing.assert_close(found, expected[range(rows), tokens])
    for each, row in zip(scored, expected, strict=True):
        best = row.topk(most)
        assert [token for token, _ in each.top] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([logprob for _, logprob in each.top]), best.values)


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    [scored] = score(random(1, 4), [2], 20)
    assert sorted(token for token, _ in scored.top) == [0, 1, 2, 3]


def test_a_prompts_rows_are_scored_with_few_rows_logits_at_a_time() -> None:
    hidden, head, tokens = random(100, WIDTH), random(WIDTH, VOCAB), [row % VOCAB for row in range(99)]
    held: list[int] = []

    def logits_of(rows: Tensor) -> Tensor:
        held.append(len(rows))
        return rows @ head

    scored = score_rows(hidden, tokens, 3, logits_of)
    assert sum(held) == 99
    assert max(held) <= 32
    expected = score(hidden[:99] @ head, tokens, 3)
    assert [each.token for each in scored] == tokens
    torch.testing.assert_close([each.logprob for each in scored], [each.logprob for each in expected])
    assert score_rows(hidden[:0], [], 3, logits_of) == []


def test_a_token_is_told_with_its_text_and_bytes() -> None:
    inner = FastTokenizer(models.BPE({"Ġhi": 0, "Ã": 1, "©": 2}, []))
    inner.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner))
    told = Scored(1, -0.5, ((0, -0.1), (1, -0.5))).told(tokenizer)
    hi, part = TokenLogprob(0, " hi", b" hi", -0.1), TokenLogprob(1, "\ufffd", b"\xc3", -0.5)
    assert told == TokenLogprob(1, "\ufffd", b"\xc3", -0.5, (hi, part))
    assert Scored(0, None).told(tokenizer).logprob is None
