"""KV caches: what the sessions of a stage hold, with explicit positions, and attention over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import StageError
from core.interfaces.architecture import SessionState
from core.interfaces.dtypes import KVDType
from core.runtime.device import fast_dtype
from core.runtime.kv_packing import PACKINGS
from core.runtime.kv_room import KVRoom
from core.runtime.layer_cache import BLOCK, LayerCache, capacity, forgotten

_MAX_SCORES = 1 << 24
"""How many scores of attention are held at once, in float32, where they have to be."""


class Segment(Protocol):
    """See core.protocol.messages.Segment: `rows` rows of `session` from `position`, the last `outputs` wanted back."""

    @property
    def session(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def outputs(self) -> int: ...


class SessionCache:
    """One session's KV on one stage. `length` is the number of tokens that it holds in every layer."""

    def __init__(self, layers: range, kv: KVDType = KVDType.AUTO) -> None:
        self.layers = {layer: LayerCache(PACKINGS[kv]) for layer in layers}
        self.state: dict[str, SessionState] = {}
        self.length = 0

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in (*self.layers.values(), *self.state.values()))

    def goes_back_to(self, position: int) -> bool:
        """Whether no layer has forgotten what rows from `position` on attend to."""
        return position == 0 or all(layer.goes_back_to(position) for layer in self.layers.values())

    def prefix(self, length: int) -> SessionCache:
        """A cache of its own with the first `length` tokens. Raises StageError where it can't be cut back to them."""
        copied = SessionCache(range(0))
        copied.layers = {layer: cache.prefix(length) for layer, cache in self.layers.items()}
        copied.state = {name: held.prefix(length) for name, held in self.state.items()}
        copied.length = length
        return copied


class CacheStore:
    """The sessions of one stage. Once it is `bounded`, no more of them are begun or extended than there is room for."""

    def __init__(self, layers: range, kv: KVDType = KVDType.AUTO) -> None:
        self._layers = layers
        self._kv = kv
        self._sessions: dict[int, SessionCache] = {}
        self._capacities: dict[int, int] = {}
        """For how many tokens each session's caches have, or are about to have, memory."""
        self._room = KVRoom()
        self._cost: Callable[[int], int] = lambda tokens: 0
        self._taken = 0

    def bound(self, room: KVRoom, cost: Callable[[int], int]) -> None:
        """Sessions, of which there are none yet, take `cost` bytes of `room` by the tokens that they have memory for.

        One block is free: a single token, by which a route is proven, finds room in a full one.
        """
        self._room, self._cost = room, cost

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def tokens(self) -> int:
        return sum(cache.length for cache in self._sessions.values())

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._sessions.values())

    def begin(self, segments: Sequence[Segment]) -> list[SessionCache]:
        """The caches that `segments` extend, each truncated to its segment's position.

        A segment at position 0 begins its session. Raises StageError, and touches no cache, where one starts past
        its cache's end, or before what its layers' windows have forgotten, or there is no room.
        """
        ends: dict[int, int] = {}
        for segment in segments:
            self._refuse(segment)
            ends[segment.session] = max(ends.get(segment.session, 0), segment.position + segment.rows)
        held = self._capacities
        self._resize(held | {session: max(capacity(end), held.get(session, 0)) for session, end in ends.items()})
        return [self._begin(segment) for segment in segments]

    def _resize(self, capacities: dict[int, int]) -> None:
        """Has the room count what sessions take then. Raises StageError, and changes nothing, if there is none."""
        if capacities != self._capacities:
            taken = max(0, sum(map(self._cost, capacities.values())) - self._cost(BLOCK))
            self._room.take(taken - self._taken)
            self._capacities, self._taken = capacities, taken

    def _refuse(self, segment: Segment) -> None:
        cache = self._sessions.get(segment.session)
        held = cache.length if cache is not None else 0
        if segment.position > held:
            raise StageError(
                f"session {segment.session} has {held} tokens cached",
                f"a segment that starts at position {segment.position} leaves a gap",
            )
        if cache is not None and not cache.goes_back_to(segment.position):
            raise forgotten(segment.position)

    def _begin(self, segment: Segment) -> SessionCache:
        cache = self._sessions.get(segment.session)
        if cache is None:
            cache = self._sessions[segment.session] = SessionCache(self._layers, self._kv)
        cache.length = segment.position
        return cache

    def copy(self, source: int, target: int, length: int) -> None:
        """Begins the session `target` with the first `length` tokens of `source`, in memory of its own.

        Raises StageError, and changes nothing, where `source` holds fewer, or can't be cut back to them, or there is no
        room.
        """
        cache = self._sessions.get(source)
        held = cache.length if cache is not None else 0
        if cache is None or length > held:
            raise StageError(f"session {source} has {held} tokens cached", f"{length} can't be copied from it")
        before = self._capacities
        self._resize({**before, target: capacity(max(1, length))})
        try:
            self._sessions[target] = cache.prefix(length)
        except BaseException:
            self._resize(before)
            raise

    def clear(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            self._sessions.pop(session, None)
        self._resize({session: tokens for session, tokens in self._capacities.items() if session in self._sessions})

    def clear_all(self) -> None:
        self.clear(list(self._sessions))


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment's rows in the batch, and its cache."""

    rows: slice
    start: int
    cache: SessionCache

    @property
    def state(self) -> dict[str, SessionState]:
        return self.cache.state


class PieceBatch:
    """The Batch of core.interfaces.architecture: of each piece its position, its number of rows, and its cache."""

    def __init__(self, pieces: Sequence[tuple[int, int, SessionCache]], device: torch.device) -> None:
        self.segments: list[_Part] = []
        positions: list[int] = []
        for start, rows, cache in pieces:
            first = len(positions)
            positions.extend(range(start, start + rows))
            self.segments.append(_Part(slice(first, len(positions)), start, cache))
        self._sizes = [rows for _, rows, _ in pieces]
        self.positions = torch.tensor(positions, dtype=torch.int64, device=device)

    def part(self, rows: Sequence[slice]) -> PieceBatch:
        owners = [next(own for own in self.segments if piece.start < own.rows.stop) for piece in rows]
        pieces = [
            (own.start + piece.start - own.rows.start, piece.stop - piece.start, own.cache)
            for piece, own in zip(rows, owners, strict=True)
        ]
        return PieceBatch(pieces, self.positions.device)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        cached = zip(self._split(q), self.extend(layer, k, v, window), strict=True)
        outputs = [
            causal_attention(rows, *both, both[0].shape[1] - len(rows), scale, window, softcap, sinks)
            for rows, both in cached
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def extend(self, layer: int, k: Tensor, v: Tensor, window: int | None = None) -> list[tuple[Tensor, Tensor]]:
        new = zip(self.segments, self._split(k), self._split(v), strict=True)
        return [own.cache.layers[layer].append(own.start, keys, values, window) for own, keys, values in new]

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        """The rows of each segment."""
        return (rows,) if len(self.segments) == 1 else torch.split_with_sizes(rows, self._sizes)


class SegmentBatch(PieceBatch):
    """One over the caches of a stage."""

    def __init__(self, segments: Sequence[Segment], store: CacheStore, device: torch.device) -> None:
        caches = store.begin(segments)
        super().__init__(
            [(each.position, each.rows, cache) for each, cache in zip(segments, caches, strict=True)], device
        )

    def commit(self) -> None:
        """Counts the rows as cached: called when every layer has them."""
        for part in self.segments:
            part.cache.length = part.start + part.rows.stop - part.rows.start


def causal_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Row i of q, at position start + i, attends to the last `window` positions up to its own, or to all of them.

    q [rows, heads, head_dim]; keys, values [kv_heads, start + rows, head_dim] -> [rows, heads, head_dim]. `softcap`
    and `sinks` as of core.interfaces.architecture.Batch.
    """
    rows, heads, dim = q.shape
    if window is not None and start >= window:
        unseen = start + 1 - window
        keys, values, start = keys[:, unseen:], values[:, unseen:], start - unseen
    dtype = fast_dtype(q.device, q.dtype)
    keys, values = keys.unsqueeze(0).to(dtype), values.unsqueeze(0).to(dtype)
    if softcap is not None or sinks is not None:
        seen = None if rows == 1 else _causal_mask(rows, start, window, q.device)
        return _scored_attention(q.to(dtype), seen, keys[0], values[0], scale, softcap, sinks).to(q.dtype)
    if rows > 1 and start == 0 and (window is None or rows <= window):
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None].to(dtype), keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1).to(q.dtype)
    # The heads that share a key become rows of one query: no repeated keys, and CUDA's fused kernels take a mask so.
    kv_heads = keys.shape[1]
    folded = q.transpose(0, 1).reshape(1, kv_heads, -1, dim).to(dtype)
    mask = None if rows == 1 else _causal_mask(rows, start, window, q.device).repeat(heads // kv_heads, 1)
    attended = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    return attended.view(heads, rows, dim).transpose(0, 1).to(q.dtype)


def _scored_attention(
    q: Tensor,
    seen: Tensor | None,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Shapes as in causal_attention; `seen`, bool [rows, length], is of the positions that each row sees; None is all.

    The heads that share a key are multiplied with it together, and of many rows some after the other.
    """
    rows, heads, dim = q.shape
    kv_heads, length, _ = keys.shape
    at_once = max(1, _MAX_SCORES // (heads * length))
    if seen is not None and rows > at_once:
        parts = zip(torch.split(q, at_once), torch.split(seen, at_once), strict=True)
        return torch.cat([_scored_attention(*part, keys, values, scale, softcap, sinks) for part in parts])
    grouped = q.transpose(0, 1).reshape(kv_heads, -1, dim)
    scores = (grouped @ keys.transpose(1, 2)).float().mul_(scale).view(heads, rows, length)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if seen is not None:
        scores = scores.masked_fill_(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(heads, 1, 1).expand(heads, rows, 1)), dim=-1)
    shares = scores.softmax(dim=-1)[..., :length].to(values.dtype)
    attended = shares.reshape(kv_heads, -1, length) @ values
    return attended.view(heads, rows, dim).transpose(0, 1)


def _causal_mask(rows: int, start: int, window: int | None, device: torch.device) -> Tensor:
    """bool [rows, start + rows]: which positions each row sees."""
    seen = torch.ones(rows, start + rows, dtype=torch.bool, device=device).tril(diagonal=start)
    return seen if window is None else seen.triu(diagonal=start + 1 - window)
