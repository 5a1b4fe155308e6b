"""KV caches: per session and layer, keys and values in one growing block, with explicit positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import StageError
from core.interfaces.architecture import SessionState
from core.runtime.device import fast_dtype
from core.runtime.kv_room import KVRoom

_BLOCK = 256
"""A cache's capacity in tokens is a multiple of this."""
_MAX_SCORES = 1 << 24
"""How many scores of attention are held at once, in float32, where they have to be."""


def capacity(tokens: int) -> int:
    """For how many tokens a cache that holds, or once held, `tokens` has memory: at most a block or a quarter more.

    It grows by a block, or by a quarter of the last power of two.
    """
    step = _step(tokens)
    return -(-tokens // step) * step


def longest_within(tokens: int) -> int:
    """How many tokens a cache can hold that has memory for `tokens`: the largest with a `capacity` within it."""
    step = _step(tokens)
    return tokens // step * step


def _step(tokens: int) -> int:
    return max(_BLOCK, 1 << max(0, (tokens - 1).bit_length() - 3))


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


class LayerCache:
    """One layer's keys and values of one session: [kv_heads, capacity, head_dim] each."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in (self.keys, self.values) if block is not None)

    def append(self, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k, v [rows, kv_heads, head_dim] from `start` on; returns all up to their end, [kv_heads, end, dim]."""
        rows = len(k)
        end = start + rows
        keys = self.keys = _room(self.keys, k, start, end)
        values = self.values = _room(self.values, v, start, end)
        keys.narrow(1, start, rows).copy_(k.transpose(0, 1))
        values.narrow(1, start, rows).copy_(v.transpose(0, 1))
        return keys.narrow(1, 0, end), values.narrow(1, 0, end)

    def prefix(self, length: int) -> LayerCache:
        """A cache of its own with the first `length` tokens."""
        copied = LayerCache()
        if self.keys is not None and self.values is not None:
            copied.append(0, self.keys[:, :length].transpose(0, 1), self.values[:, :length].transpose(0, 1))
        return copied


def _room(block: Tensor | None, like: Tensor, start: int, end: int) -> Tensor:
    """`block`, or a larger one that begins with its first `start` tokens, with room for `end`."""
    if block is not None and end <= block.shape[1]:
        return block
    larger = like.new_empty(like.shape[1], capacity(end), like.shape[2])
    if block is not None:
        larger[:, :start] = block[:, :start]
    return larger


class SessionCache:
    """One session's KV on one stage. `length` is the number of tokens that it holds in every layer."""

    def __init__(self, layers: range) -> None:
        self.layers = {layer: LayerCache() for layer in layers}
        self.state: dict[str, SessionState] = {}
        self.length = 0

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in (*self.layers.values(), *self.state.values()))

    def prefix(self, length: int) -> SessionCache:
        """A cache of its own with the first `length` tokens. Raises StageError where the state can't be cut there."""
        copied = SessionCache(range(0))
        copied.layers = {layer: cache.prefix(length) for layer, cache in self.layers.items()}
        copied.state = {name: held.prefix(length) for name, held in self.state.items()}
        copied.length = length
        return copied


class CacheStore:
    """The sessions of one stage. Once it is `bounded`, no more of them are begun or extended than there is room for."""

    def __init__(self, layers: range) -> None:
        self._layers = layers
        self._sessions: dict[int, SessionCache] = {}
        self._capacities: dict[int, int] = {}
        """For how many tokens each session's caches have, or are about to have, memory."""
        self._room = KVRoom()
        self._token_bytes = 0

    def bound(self, room: KVRoom, token_bytes: int) -> None:
        """Sessions, of which there are none yet, take `token_bytes` of `room` for each token that they have memory for.

        One block is free: a single token, by which a route is proven, finds room in a full one.
        """
        self._room, self._token_bytes = room, token_bytes

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
        its cache's end, or there is no room.
        """
        ends: dict[int, int] = {}
        for segment in segments:
            self._refuse_gap(segment)
            ends[segment.session] = max(ends.get(segment.session, 0), segment.position + segment.rows)
        self._make_room(ends)
        return [self._begin(segment) for segment in segments]

    def _make_room(self, ends: Mapping[int, int]) -> None:
        """For sessions that are to have so many tokens."""
        held = self._capacities
        grown = {session: tokens for session, end in ends.items() if (tokens := capacity(end)) > held.get(session, 0)}
        if grown:
            self._resize(sum(tokens - held.get(session, 0) for session, tokens in grown.items()))
            held.update(grown)

    def _resize(self, tokens: int) -> None:
        before = sum(self._capacities.values())
        counted, wanted = (max(0, each - _BLOCK) * self._token_bytes for each in (before, before + tokens))
        self._room.take(wanted - counted)

    def _refuse_gap(self, segment: Segment) -> None:
        cache = self._sessions.get(segment.session)
        held = cache.length if cache is not None else 0
        if segment.position > held:
            raise StageError(
                f"session {segment.session} has {held} tokens cached",
                f"a segment that starts at position {segment.position} leaves a gap",
            )

    def _begin(self, segment: Segment) -> SessionCache:
        cache = self._sessions.get(segment.session)
        if cache is None:
            cache = self._sessions[segment.session] = SessionCache(self._layers)
        cache.length = segment.position
        return cache

    def copy(self, source: int, target: int, length: int) -> None:
        """Begins the session `target` with the first `length` tokens of `source`, in memory of its own.

        Raises StageError, and changes nothing, where `source` holds fewer, or keeps a state that can't be cut back
        (see ModelSpec.can_truncate), or there is no room.
        """
        cache = self._sessions.get(source)
        held = cache.length if cache is not None else 0
        if cache is None or length > held:
            raise StageError(f"session {source} has {held} tokens cached", f"{length} can't be copied from it")
        copied, tokens = cache.prefix(length), capacity(max(1, length))
        self._resize(tokens - self._capacities.get(target, 0))
        self._sessions[target], self._capacities[target] = copied, tokens

    def clear(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            if self._sessions.pop(session, None) is not None:
                self._resize(-self._capacities[session])
                del self._capacities[session]

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


class SegmentBatch:
    """The Batch of core.interfaces.architecture, over the caches of one stage."""

    def __init__(self, segments: Sequence[Segment], store: CacheStore, device: torch.device) -> None:
        self.segments: list[_Part] = []
        positions: list[int] = []
        for segment, cache in zip(segments, store.begin(segments), strict=True):
            first = len(positions)
            positions.extend(range(segment.position, segment.position + segment.rows))
            self.segments.append(_Part(slice(first, len(positions)), segment.position, cache))
        self._sizes = [segment.rows for segment in segments]
        self.positions = torch.tensor(positions, dtype=torch.int64, device=device)

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
        cached = zip(self.segments, self._split(q), self.extend(layer, k, v), strict=True)
        outputs = [
            causal_attention(rows, *both, part.start, scale, window, softcap, sinks) for part, rows, both in cached
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        new = zip(self.segments, self._split(k), self._split(v), strict=True)
        return [part.cache.layers[layer].append(part.start, *rows) for part, *rows in new]

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        """The rows of each segment."""
        return (rows,) if len(self.segments) == 1 else torch.split_with_sizes(rows, self._sizes)

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
