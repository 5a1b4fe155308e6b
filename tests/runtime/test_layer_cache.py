"""A layer with a window forgets what slid out of it, and nothing that a row sees, or would after going back."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from core.errors import StageError
from core.interfaces.architecture import CacheSize
from core.interfaces.dtypes import DType, KVDType
from core.runtime.kv_cache import CacheStore, SegmentBatch
from core.runtime.kv_packing import PACKINGS
from core.runtime.layer_cache import ROLLBACK, LayerCache, can_cut, capacity, held_tokens, window_capacity
from core.runtime.session_cost import ENDLESS, SessionCost, longest_session

CPU = torch.device("cpu")
KV_HEADS, HEADS, DIM = 2, 6, 16
TOKENS = 1500
WINDOW = 100


class Piece(NamedTuple):
    session: int
    position: int
    rows: int
    outputs: int = 1


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def keys_and_values() -> tuple[Tensor, Tensor]:
    return random(TOKENS, KV_HEADS, DIM, seed=1), random(TOKENS, KV_HEADS, DIM, seed=2)


@pytest.mark.parametrize("steps", [[1] * TOKENS, [700, 1, 1, 98, 700], [1500], [360, 1, 1000, 139]], ids=len)
@pytest.mark.parametrize("window", [1, WINDOW, 1000, 5000])
def test_rows_get_what_they_see_whatever_slid_out(steps: list[int], window: int) -> None:
    k, v = keys_and_values()
    cache, start = LayerCache(), 0
    for rows in steps:
        end = start + rows
        keys, values = cache.append(start, k[start:end], v[start:end], window)
        seen = slice(max(0, start + 1 - window), end)
        assert torch.equal(keys, k[seen].transpose(0, 1))
        assert torch.equal(values, v[seen].transpose(0, 1))
        assert cache.nbytes == held_tokens(end, window) * 2 * KV_HEADS * DIM * 4
        start = end
    assert held_tokens(TOKENS, window) == min(window_capacity(window), capacity(TOKENS))


@pytest.mark.parametrize("window", [None, WINDOW])
def test_eight_bits_take_half_and_are_off_by_half_a_step_of_each_head_and_token(window: int | None) -> None:
    k, v = keys_and_values()
    k[7] *= 1000
    v[8, 1] *= 1e-6
    size = CacheSize(2 * KV_HEADS * DIM, token_rows=2 * KV_HEADS)
    cost = SessionCost([size], DType.BF16, KVDType.INT8)
    cache, whole = LayerCache(PACKINGS[KVDType.INT8]), LayerCache(PACKINGS[KVDType.INT8])
    for start in range(0, TOKENS, 100):
        end = start + 100
        keys, values = cache.append(start, k[start:end], v[start:end], window)
        assert cache.nbytes == cost(held_tokens(end, window))
        for held, given in ((keys, k), (values, v)):
            seen = given[end - held.shape[1] : end].transpose(0, 1)
            step = seen.abs().amax(dim=-1, keepdim=True) / 127
            assert ((held - seen).abs() <= 0.51 * step + 1e-7).all()
    assert torch.equal(whole.append(0, k, v, window)[0][:, -100:], keys[:, -100:]), "however it is cut"
    assert cache.prefix(TOKENS - 50).nbytes == cache.nbytes
    plain = SessionCost([size], DType.BF16)
    assert 0.5 < cost(capacity(TOKENS)) / plain(capacity(TOKENS)) < 0.6


def test_a_row_without_values_and_one_of_zeros_come_back_as_they_were() -> None:
    cache = LayerCache(PACKINGS[KVDType.INT8])
    keys, values = cache.append(0, torch.zeros(3, 1, DIM), torch.zeros(3, 1, 0))
    assert torch.equal(keys, torch.zeros(1, 3, DIM))
    assert values.shape == (1, 3, 0)


@pytest.mark.parametrize("back", [1, 60, ROLLBACK])
def test_a_session_goes_back_a_little_at_any_time(back: int) -> None:
    k, v = keys_and_values()
    cache = LayerCache()
    for start in range(TOKENS):
        cache.append(start, k[start : start + 1], v[start : start + 1], WINDOW)
        again = max(0, start + 1 - back)
        assert cache.goes_back_to(again)
        keys, _ = cache.append(again, k[again : start + 1], v[again : start + 1], WINDOW)
        assert torch.equal(keys, k[max(0, again + 1 - WINDOW) : start + 1].transpose(0, 1))


@pytest.mark.parametrize("kv", KVDType)
def test_a_session_goes_back_to_the_end_of_its_last_whole_chunk(kv: KVDType) -> None:
    k, v = keys_and_values()
    cache, whole = LayerCache(PACKINGS[kv]), LayerCache(PACKINGS[kv])
    expected = whole.append(0, k[:650], v[:650])
    for start, end in ((0, 300), (300, 640), *((at, at + 1) for at in range(640, 1200))):
        cache.append(start, k[start:end], v[start:end], WINDOW)
    assert not cache.goes_back_to(641)
    size = CacheSize(2 * KV_HEADS * DIM, WINDOW, token_rows=2 * KV_HEADS)
    assert cache.nbytes == SessionCost([size], DType.FP32, kv)(capacity(1200))
    copied = cache.prefix(640)
    for each in (cache, copied, cache, copied):
        found = each.append(640, k[640:650], v[640:650], WINDOW)
        for held, all_of_it in zip(found, expected, strict=True):
            assert torch.equal(held, all_of_it[:, 641 - WINDOW :])
        for at in range(650, 1200):
            each.append(at, k[at : at + 1], v[at : at + 1], WINDOW)
    cache.append(1150, k[:1], v[:1], WINDOW)
    assert cache.goes_back_to(640)
    short = copied.prefix(1200)
    assert short.goes_back_to(640)
    short.append(0, k[:1], v[:1], WINDOW)
    for at in range(1, 700):
        short.append(at, k[at : at + 1], v[at : at + 1], WINDOW)
    assert not short.goes_back_to(64), "there was no chunk"


def test_what_is_written_over_is_no_snapshot() -> None:
    k, v = keys_and_values()
    cache = LayerCache()
    cache.append(0, k[:640], v[:640], WINDOW)
    for at in range(600, 1000):
        cache.append(at, k[at : at + 1], v[at : at + 1], WINDOW)
    assert not cache.goes_back_to(640)


def store_of(tokens: int, window: int | None) -> CacheStore:
    store = CacheStore(range(1))
    k, v = keys_and_values()
    q = random(TOKENS, HEADS, DIM, seed=3)
    for start in range(0, tokens, 200):
        rows = slice(start, min(tokens, start + 200))
        batch = SegmentBatch([Piece(1, start, rows.stop - start)], store, CPU)
        batch.attend(0, q[rows], k[rows], v[rows], scale=1, window=window)
        batch.commit()
    return store


def test_who_goes_back_further_is_refused_and_may_begin_again() -> None:
    store = store_of(1000, WINDOW)
    with pytest.raises(StageError, match="can't go back to position 300: what slid out of their windows is forgotten"):
        SegmentBatch([Piece(1, 300, 1)], store, CPU)
    with pytest.raises(StageError, match="can't go back to position 300"):
        store.copy(1, 2, 300)
    assert (len(store), store.tokens) == (1, 1000)
    SegmentBatch([Piece(1, 0, 1)], store, CPU)


@pytest.mark.parametrize(("held", "length"), [(1000, 1000), (1000, 950), (200, 10), (1500, 1440)])
def test_a_copy_goes_on_as_its_source_does(held: int, length: int) -> None:
    k, v = keys_and_values()
    q = random(5, HEADS, DIM, seed=4)
    store = store_of(held, WINDOW)
    assert can_cut(held, length, WINDOW)
    store.copy(1, 2, length)
    rest = slice(length, length + 5)
    if rest.stop > TOKENS:
        rest = slice(TOKENS - 5, TOKENS)
    first, second = (
        SegmentBatch([Piece(session, length, 5)], store, CPU).attend(0, q, k[rest], v[rest], scale=1, window=WINDOW)
        for session in (1, 2)
    )
    assert torch.equal(first, second)


def test_what_is_said_to_be_cut_can_be_cut() -> None:
    k, v = keys_and_values()
    cache = LayerCache()
    for held in range(1, 800):
        cache.append(held - 1, k[held - 1 : held], v[held - 1 : held], WINDOW)
        for length in (1, held // 2, max(1, held - 64), held):
            assert not can_cut(held, length, WINDOW) or cache.goes_back_to(length), (held, length)
    assert can_cut(10**6, 1, None)
    assert not can_cut(1000, 900, WINDOW)


def test_a_long_session_takes_a_fraction_where_layers_slide() -> None:
    assert store_of(TOKENS, WINDOW).nbytes * 4 <= store_of(TOKENS, None).nbytes


def test_a_session_costs_its_tokens_its_windows_and_its_states() -> None:
    full, sliding, recurrent = CacheSize(10), CacheSize(10, window=WINDOW), CacheSize(0, None, 7, 5)
    cost = SessionCost([full, sliding, recurrent], DType.BF16)
    assert cost(256) == 2 * (2560 + 2560 + 7) + 20
    assert cost(4096) == 2 * (40960 + 10 * (window_capacity(WINDOW) + WINDOW - 1) + 7) + 20
    assert cost.of({256: 2, 4096: 1}) == 2 * cost(256) + cost(4096)
    longest = longest_session(cost, 100_000)
    assert cost(longest) <= 100_000 < cost(longest + 1)
    assert longest_session(cost, 10) == 0
    assert longest_session(SessionCost([recurrent], DType.FP32), 48) == ENDLESS - 1
    assert longest_session(SessionCost([recurrent], DType.FP32), 47) == 0
