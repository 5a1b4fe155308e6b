"""Caches keep what they were given, at the positions they were given; attention equals its definition."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import StageError
from core.runtime import kv_cache
from core.runtime.kv_cache import CacheStore, SegmentBatch, causal_attention
from core.runtime.layer_cache import LayerCache, capacity

CPU = torch.device("cpu")
KV_HEADS, HEADS, DIM = 2, 6, 16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Piece(NamedTuple):
    session: int
    position: int
    rows: int
    outputs: int = 1


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_definition(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax over the last positions up to each row's own, head by head, in float64."""
    rows, heads, _ = q.shape
    shared = heads // len(keys)
    result = torch.empty(q.shape, dtype=torch.float64)
    for row in range(rows):
        end = start + row + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        for head in range(heads):
            k, v = keys[head // shared, seen].double(), values[head // shared, seen].double()
            scores = k @ q[row, head].double() * scale
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            sink = scores[:0] if sinks is None else sinks[head, None].double()
            weights = torch.softmax(torch.cat((scores, sink)), dim=0)[: len(scores)]
            result[row, head] = weights @ v
    return result


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 9), (5, 1), (5, 4), (300, 1), (300, 3)])
def test_attention_is_what_it_is_defined_as(dtype: torch.dtype, kv_heads: int, start: int, rows: int) -> None:
    q = random(rows, HEADS, DIM, seed=1, dtype=dtype)
    keys = random(kv_heads, start + rows, DIM, seed=2, dtype=dtype)
    values = random(kv_heads, start + rows, DIM, seed=3, dtype=dtype)
    scale = 1 / math.sqrt(DIM)
    attended = causal_attention(q, keys, values, start, scale)
    assert attended.shape == q.shape
    assert attended.dtype is dtype
    assert (attended - by_definition(q, keys, values, start, scale)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (2.0, None), (None, random(HEADS, seed=4))])
@pytest.mark.parametrize("window", [None, 1, 4, 8, 1000])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 9), (5, 1), (5, 4), (300, 1), (300, 9)])
@pytest.mark.parametrize("scores", [1 << 24, 1000])
def test_attention_heeds_window_softcap_and_sinks(
    dtype: torch.dtype,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    start: int,
    rows: int,
    scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "_MAX_SCORES", scores)
    q = random(rows, HEADS, DIM, seed=1, dtype=dtype)
    keys = random(KV_HEADS, start + rows, DIM, seed=2, dtype=dtype)
    values = random(KV_HEADS, start + rows, DIM, seed=3, dtype=dtype)
    attended = causal_attention(q, keys, values, start, 0.5, window, softcap, sinks)
    assert attended.shape == q.shape
    assert attended.dtype is dtype
    expected = by_definition(q, keys, values, start, 0.5, window, softcap, sinks)
    assert (attended - expected).abs().max() < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 5])
def test_what_no_row_sees_is_not_read(rows: int) -> None:
    q, keys, values = (random(n, m, DIM, seed=n) for n, m in ((rows, HEADS), (KV_HEADS, 40), (KV_HEADS, 40)))
    start, window = 40 - rows, 8
    keys[:, : start + 1 - window] = values[:, : start + 1 - window] = torch.nan
    assert torch.isfinite(causal_attention(q, keys, values, start, 1.0, window)).all()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 9), (5, 1), (5, 4)])
def test_torch_never_gets_both_a_mask_and_shared_keys(
    start: int, rows: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA has no fused kernel for that: it would hold all scores, in float32."""
    attention, calls = F.scaled_dot_product_attention, 0

    def checked(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        assert attn_mask is None or (q.shape[1] == k.shape[1] and not options.get("enable_gqa"))
        return attention(q, k, v, attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    keys = random(KV_HEADS, start + rows, DIM)
    causal_attention(random(rows, HEADS, DIM), keys, keys, start, 1.0, window)
    assert calls == 1


def test_attention_heeds_the_scale() -> None:
    q, keys, values = random(2, HEADS, DIM), random(KV_HEADS, 7, DIM, seed=1), random(KV_HEADS, 7, DIM, seed=2)
    attended = causal_attention(q, keys, values, 5, 0.5)
    assert (attended - by_definition(q, keys, values, 5, 0.5)).abs().max() < 1e-5


@pytest.mark.parametrize("steps", [[1] * 600, [255, 1, 1], [256, 256, 1], [257, 1], [10, 500, 1, 1000]], ids=len)
def test_growth_keeps_what_is_cached(steps: list[int]) -> None:
    total = sum(steps)
    k, v = random(total, KV_HEADS, DIM, seed=1), random(total, KV_HEADS, DIM, seed=2)
    cache, start = LayerCache(), 0
    for rows in steps:
        keys, values = cache.append(start, k[start : start + rows], v[start : start + rows])
        start += rows
        assert torch.equal(keys, k[:start].transpose(0, 1))
        assert torch.equal(values, v[:start].transpose(0, 1))
    assert cache.nbytes == capacity(total) * 2 * KV_HEADS * DIM * 4


def test_capacity_is_bounded_by_a_block_or_a_quarter_more() -> None:
    assert [capacity(tokens) for tokens in (1, 256, 257, 2048, 2049, 4096, 4097)] == [
        256, 256, 512, 2048, 2560, 4096, 5120,
    ]  # fmt: skip
    previous = 0
    for tokens in range(1, 10_000):
        assert tokens <= capacity(tokens) <= tokens + max(255, tokens // 4)
        assert capacity(tokens) >= previous
        assert capacity(capacity(tokens)) == capacity(tokens)
        previous = capacity(tokens)


@pytest.mark.parametrize("position", [0, 1, 7, 19])
def test_writing_at_an_earlier_position_forgets_what_was_behind_it(position: int) -> None:
    cache = LayerCache()
    first, second = random(20, KV_HEADS, DIM, seed=1), random(3, KV_HEADS, DIM, seed=2)
    cache.append(0, first, first)
    keys, _ = cache.append(position, second, second)
    assert torch.equal(keys, torch.cat([first[:position], second]).transpose(0, 1))


def test_growth_after_a_truncation_keeps_what_is_before_it() -> None:
    cache = LayerCache()
    first, second = random(250, KV_HEADS, DIM, seed=1), random(400, KV_HEADS, DIM, seed=2)
    cache.append(0, first, first)
    keys, values = cache.append(100, second, second)
    assert torch.equal(keys, torch.cat([first[:100], second]).transpose(0, 1))
    assert torch.equal(values, keys)


def fill(store: CacheStore, *pieces: Piece) -> None:
    batch = SegmentBatch(pieces, store, CPU)
    rows = sum(piece.rows for piece in pieces)
    for layer in range(2):
        batch.attend(layer, random(rows, HEADS, DIM), random(rows, KV_HEADS, DIM), random(rows, KV_HEADS, DIM), scale=1)
    batch.commit()


def test_positions_are_each_sessions_own() -> None:
    store = CacheStore(range(2))
    fill(store, Piece(1, 0, 3), Piece(2, 0, 5))
    batch = SegmentBatch([Piece(2, 5, 1), Piece(1, 3, 2), Piece(3, 0, 2)], store, CPU)
    assert batch.positions.tolist() == [5, 3, 4, 0, 1]


def test_a_store_counts_sessions_tokens_and_bytes() -> None:
    store = CacheStore(range(2))
    assert (len(store), store.tokens, store.nbytes) == (0, 0, 0)
    fill(store, Piece(1, 0, 3), Piece(2, 0, 300))
    assert (len(store), store.tokens) == (2, 303)
    assert store.nbytes == 2 * 2 * (256 + 512) * KV_HEADS * DIM * 4
    store.clear([2, 99])
    assert (len(store), store.tokens) == (1, 3)
    store.clear_all()
    assert (len(store), store.tokens, store.nbytes) == (0, 0, 0)


def test_a_segment_before_the_end_truncates_and_one_at_zero_begins_anew() -> None:
    store = CacheStore(range(2))
    fill(store, Piece(1, 0, 10))
    fill(store, Piece(1, 4, 2))
    assert store.tokens == 6
    fill(store, Piece(1, 0, 1))
    assert (len(store), store.tokens) == (1, 1)


@pytest.mark.parametrize("length", [0, 1, 256, 299, 300])
def test_a_session_begins_with_the_first_tokens_of_another(length: int) -> None:
    store = CacheStore(range(2))
    fill(store, Piece(1, 0, 300))
    store.copy(1, 2, length)
    assert (len(store), store.tokens) == (2, 300 + length)
    assert store.nbytes == 2 * 2 * (512 + capacity(length)) * KV_HEADS * DIM * 4
    rest, begun = Piece(1, length, 3), Piece(2, length, 3)
    q, k, v = random(3, HEADS, DIM, seed=4), random(3, KV_HEADS, DIM, seed=5), random(3, KV_HEADS, DIM, seed=6)
    first, second = (SegmentBatch([piece], store, CPU).attend(1, q, k, v, scale=1) for piece in (rest, begun))
    assert torch.equal(first, second)


def test_a_copy_is_its_own() -> None:
    store = CacheStore(range(2))
    fill(store, Piece(1, 0, 10))
    store.copy(1, 2, 10)
    fill(store, Piece(1, 0, 10))
    store.clear([1])
    assert (len(store), store.tokens) == (1, 10)


def test_a_copy_takes_the_place_of_what_was_there() -> None:
    store = CacheStore(range(2))
    fill(store, Piece(1, 0, 10), Piece(2, 0, 20))
    store.copy(1, 2, 4)
    assert store.tokens == 14


@pytest.mark.parametrize(("source", "length", "held"), [(1, 11, 10), (3, 0, 0), (3, 1, 0)])
def test_more_than_a_session_holds_is_not_copied(source: int, length: int, held: int) -> None:
    store = CacheStore(range(2))
    fill(store, Piece(1, 0, 10))
    with pytest.raises(StageError, match=f"session {source} has {held} tokens cached: {length} can't be copied"):
        store.copy(source, 2, length)
    assert (len(store), store.tokens) == (1, 10)


@pytest.mark.parametrize(("held", "position"), [(0, 1), (10, 11), (10, 2**40)])
def test_a_gap_is_refused_with_its_numbers(held: int, position: int) -> None:
    store = CacheStore(range(2))
    if held:
        fill(store, Piece(7, 0, held))
    with pytest.raises(StageError, match=f"session 7 has {held} tokens cached.*position {position} leaves a gap"):
        SegmentBatch([Piece(7, position, 1)], store, CPU)
    assert store.tokens == held


def test_what_is_not_committed_is_not_cached() -> None:
    store = CacheStore(range(2))
    fill(store, Piece(1, 0, 10))
    batch = SegmentBatch([Piece(1, 10, 1)], store, CPU)
    one = random(1, KV_HEADS, DIM)
    batch.attend(0, random(1, HEADS, DIM), one, one, scale=1)
    assert store.tokens == 10
    fill(store, Piece(1, 10, 1))
    assert store.tokens == 11
