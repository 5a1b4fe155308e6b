"""What sessions cache, as transformers' code wants it.

Keys and values are core's to keep. What layers of other kinds keep is a session's state: recurrent states, which can
be put side by side for several sessions, and whatever else a family has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

from core import Batch, StageError

_ATTENTION = (DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
_BOTH = (
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
)
_STATES = ("conv_states", "recurrent_states")


class Attended(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one attention layer, of the sessions of one pass."""

    def __init__(self, layer: int, batch: Batch, window: int | None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.is_initialized = True
        self._layer, self._batch, self._window = layer, batch, window
        self._length = max(segment.start for segment in batch.segments)

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many positions are attended to, and the first of them."""
        first = 0 if self._window is None else max(0, self._length + 1 - self._window)
        return self._length + query_length - first, first

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """[sessions, heads, rows, width] each -> [sessions, heads, tokens, width], the shorter ones behind zeros."""
        k, v = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        keys, values = zip(*self._batch.extend(self._layer, k, v, self._window), strict=True)
        return _side_by_side(keys), _side_by_side(values)


class _Both(LinearAttentionLayer, Attended):  # type: ignore[misc]
    """Of a layer that attends and has a recurrent `state` as well."""

    def __init__(self, state: LinearAttentionLayer, layer: int, batch: Batch, window: int | None) -> None:
        Attended.__init__(self, layer, batch, window)
        self.__dict__.update(state.__dict__)


class States:
    """What a session's layers keep that is no keys and values, by their numbers in the whole model."""

    def __init__(self, layers: dict[int, Any]) -> None:
        self.layers = layers
        self._length: int | None = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_of(*self.layers.values()))

    def begin(self, start: int) -> None:
        """Raises StageError unless they are those behind `start` tokens."""
        if self._length != start:
            raise _no_way_back(start)
        self._length = None

    def commit(self, length: int) -> None:
        """They are those behind `length` tokens by now."""
        self._length = length

    def prefix(self, length: int) -> States:
        """The same for another session. Raises StageError unless it has `length` tokens."""
        if self._length != length:
            raise _no_way_back(length)
        return copy.deepcopy(self)


class Caches:
    """Makes transformers' cache for each pass through a stage's `layers`."""

    def __init__(self, config: Any, layers: range) -> None:
        self._model = DynamicCache(config=config)
        self._layers = layers
        self._stateful = [layer for layer in layers if has_state(self._model.layers[layer])]

    @property
    def any_attends(self) -> bool:
        return any(map(self.attends, range(len(self._model.layers))))

    def attends(self, layer: int) -> bool:
        return isinstance(self._model.layers[layer], DynamicLayer)

    def window(self, layer: int) -> int | None:
        window: int | None = getattr(self._model.layers[layer], "sliding_window", None)
        return window

    @property
    def can_be_joined(self) -> bool:
        """Whether the states of several sessions can be put side by side."""
        return all(isinstance(self._model.layers[layer], LinearAttentionLayer) for layer in self._stateful)

    def new_states(self) -> States | None:
        """Of a session that begins; None where layers keep nothing but keys and values."""
        made = {layer: _new_state(self._model.layers[layer]) for layer in self._stateful}
        return States(made) if made else None

    def of(self, batch: Batch, states: dict[int, Any]) -> DynamicCache:
        """For one pass of `batch`, with the `states` of its sessions side by side."""
        cache = copy.copy(self._model)
        cache.layers = [self._view(layer, batch, states.get(layer)) for layer in range(len(self._model.layers))]
        return cache

    def _view(self, layer: int, batch: Batch, state: Any) -> Any:
        like = self._model.layers[layer]
        if type(like) in _ATTENTION:
            return Attended(layer, batch, self.window(layer))
        if isinstance(like, LinearAttentionLayer) and state is None:
            state = _elsewhere(like, begun=any(segment.start > 0 for segment in batch.segments))
        if type(like) in _BOTH:
            return _Both(state, layer, batch, self.window(layer))
        if state is None and isinstance(like, DynamicLayer):
            return Attended(layer, batch, None)
        return like if state is None else state


def has_state(layer: Any) -> bool:
    """Whether a layer keeps something that can't be cut back to an earlier token."""
    return type(layer) not in (*_ATTENTION, cache_utils.DummyLayer)


def joined(sessions: Sequence[States]) -> dict[int, Any]:
    """The states of several sessions side by side, for one pass; a single one's own."""
    if len(sessions) == 1:
        return sessions[0].layers
    return {layer: _joined([each.layers[layer] for each in sessions]) for layer in sessions[0].layers}


def part(side_by_side: dict[int, Any], sessions: Sequence[States]) -> None:
    """Gives each session its own of what a pass has made of the states of several."""
    for layer, whole in side_by_side.items():
        for index, session in enumerate(sessions):
            for name in _STATES:
                own = getattr(session.layers[layer], name)
                for key, value in getattr(whole, name).items():
                    if value is not None:
                        own[key].copy_(value[index : index + 1])


def tensors_of(*layers: Any) -> Iterator[Tensor]:
    """All that some layers of a cache hold."""
    for layer in layers:
        yield from _tensors(vars(layer).values())


def _joined(layers: Sequence[LinearAttentionLayer]) -> LinearAttentionLayer:
    whole = copy.copy(layers[0])
    for name in _STATES:
        first = getattr(layers[0], name)
        states = {
            key: None if value is None else torch.cat([getattr(each, name)[key] for each in layers])
            for key, value in first.items()
        }
        setattr(whole, name, states)
    return whole


def _new_state(like: Any) -> Any:
    return LinearAttentionLayer(like.number_of_states) if type(like) in _BOTH else copy.deepcopy(like)


def _elsewhere(like: LinearAttentionLayer, *, begun: bool) -> LinearAttentionLayer:
    """Of a layer that another stage has: all that is asked of it is whether it has seen tokens."""
    state = LinearAttentionLayer(like.number_of_states)
    state.has_previous_state = dict.fromkeys(state.has_previous_state, begun)
    return state


def _side_by_side(held: Sequence[Tensor]) -> Tensor:
    """[heads, tokens, width] of each session -> [sessions, heads, most tokens, width]."""
    if len(held) == 1:
        return held[0][None]
    heads, _, width = held[0].shape
    longest = max(each.shape[1] for each in held)
    together = held[0].new_zeros(len(held), heads, longest, width)
    for index, each in enumerate(held):
        together[index, :, longest - each.shape[1] :] = each
    return together


def _no_way_back(position: int) -> StageError:
    return StageError(
        f"these layers can't go back to position {position}",
        "they keep a sum over all that they have seen",
        "start the session again from its first token",
    )


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
