"""How far back caches can be cut, and where chunks end for it."""

from __future__ import annotations

import pytest

from core.runtime.cuts import ANYWHERE, MIN_TAIL, Cuts

SNAPSHOTS = Cuts(truncates=False, snapshots=True)
SLIDING = Cuts(snapshots=True, windows=frozenset({None, 100}))


@pytest.mark.parametrize(
    ("cuts", "held", "wanted", "snapshot", "expected"),
    [
        (ANYWHERE, 5000, 17, 0, 17),
        (Cuts(windows=frozenset({None, 100})), 200, 17, 0, 17),
        (Cuts(windows=frozenset({None, 100})), 5000, 4950, 0, 4950),
        (Cuts(windows=frozenset({None, 100})), 5000, 4000, 0, 0),
        (SLIDING, 5000, 4000, 128, 128),
        (SLIDING, 5000, 4950, 128, 4950),
        (SLIDING, 200, 100, 128, 100),
        (Cuts(truncates=False), 5000, 5000, 0, 5000),
        (Cuts(truncates=False), 5000, 4999, 128, 0),
        (SNAPSHOTS, 5000, 5000, 128, 5000),
        (SNAPSHOTS, 5000, 4999, 128, 128),
        (SNAPSHOTS, 5000, 127, 128, 0),
    ],
)
def test_caches_are_cut_to_what_they_still_know(
    cuts: Cuts, held: int, wanted: int, snapshot: int, expected: int
) -> None:
    assert cuts.longest(held, wanted, snapshot) == expected


@pytest.mark.parametrize(
    ("start", "end", "prompt", "expected"),
    [(0, 150, 150, 128), (0, 512, 2000, 512), (1536, 2000, 2000, 1984), (1984, 2000, 2000, 2000), (0, 70, 70, 70)],
)
def test_a_prompts_last_chunk_begins_at_a_snapshot(start: int, end: int, prompt: int, expected: int) -> None:
    assert SNAPSHOTS.chunk_end(start, end, prompt) == expected
    assert ANYWHERE.chunk_end(start, end, prompt) == end
    assert SLIDING.chunk_end(start, end, prompt) == (expected if prompt > 300 else end)
    assert expected == end or prompt - expected >= MIN_TAIL
    assert SNAPSHOTS.is_snapshot(expected - start, expected) is (expected % 64 == 0)
    assert not ANYWHERE.is_snapshot(64, 64)
    assert not SNAPSHOTS.is_snapshot(1, 64)
