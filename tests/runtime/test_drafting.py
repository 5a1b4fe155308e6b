"""House rules: a search through the whole text is the oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from core.runtime.drafting import Drafter


def drafted(tokens: Sequence[int], limit: int) -> list[int]:
    drafter = Drafter()
    drafter.extend(tokens)
    return drafter.draft(limit)


def oracle(tokens: list[int], limit: int) -> list[int]:
    for length in (4, 3, 2):
        for start in range(len(tokens) - length - 1, -1, -1):
            if length < len(tokens) and tokens[start : start + length] == tokens[-length:]:
                text = list(tokens)
                while len(text) < len(tokens) + limit:
                    text.append(text[start + length + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 10, 50])
@pytest.mark.parametrize("limit", [0, 1, 5, 12])
def test_drafts_are_what_a_search_finds(vocabulary: int, limit: int) -> None:
    rng = random.Random(0)
    for _ in range(60):
        tokens = [rng.randrange(vocabulary) for _ in range(rng.randrange(60))]
        assert drafted(tokens, limit) == oracle(tokens, limit)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("a", ""),
        ("ab", ""),
        ("ab ab", " ab "),
        ("xab1 yab2 ab", "2 ab"),
        ("wxyz1 xyz2 yz3 wxyz", "1 xy"),
        ("wxyz1 xyz2 yz3 xyz", "2 yz"),
        ("aaaa", "aaaa"),
    ],
)
def test_the_longest_end_counts_and_then_the_latest_place(text: str, expected: str) -> None:
    assert "".join(map(chr, drafted([ord(letter) for letter in text], 4))) == expected


def test_it_makes_no_difference_how_the_text_came() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(4) for _ in range(200)]
    whole, piecewise = Drafter(), Drafter()
    for token in tokens:
        piecewise.extend([token])
        piecewise.draft(3)
        whole.extend([token])
        assert piecewise.draft(6) == whole.draft(6)
    assert drafted(tokens, 6) == whole.draft(6)
