"""What one session caches on one stage, as transformers' cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

from core import StageError

_FORGETFUL = {cache_utils.DynamicSlidingWindowLayer: DynamicLayer}
"""Layers that forget what slid out of their window could not be rolled back: the whole is kept, the mask hides it."""

_CUTTABLE = (DynamicLayer, cache_utils.DynamicIndexedLayer, cache_utils.DummyLayer)


class Elsewhere(DynamicLayer):  # type: ignore[misc]
    """The cache of all layers that are on other stages: only their length is known."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def get_seq_length(self) -> int:
        return self.length


class Session:
    """The caches of a stage's `layers`, by their numbers in the whole model."""

    def __init__(self, config: Any, layers: range) -> None:
        self.cache = DynamicCache(config=config)
        self._elsewhere = Elsewhere()
        own = {layer: _remembering(self.cache.layers[layer]) for layer in layers}
        self.cache.layers = [own.get(layer, self._elsewhere) for layer in range(len(self.cache.layers))]
        self._own = list(own.values())
        self._length: int | None = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self._own for tensor in _tensors(vars(layer).values()))

    @property
    def is_recurrent(self) -> bool:
        return any(is_recurrent(layer) for layer in self._own)

    def begin(self, start: int) -> None:
        """Makes `start` the number of tokens cached. Raises StageError where more are, and can't be forgotten."""
        if self._length != start:
            self._cut(start)
        self._length = None

    def expect(self, start: int) -> None:
        """The next pass is at `start`: as many tokens are cached elsewhere."""
        self._elsewhere.length = start

    def commit(self, length: int) -> None:
        """`length` tokens are cached in every layer now."""
        self._length = length

    def prefix(self, length: int) -> Session:
        """Its first `length` tokens, for another session. Raises StageError where the rest can't be forgotten."""
        twin = copy.deepcopy(self)
        twin._cut(length)
        twin.commit(length)
        return twin

    def _cut(self, start: int) -> None:
        if self.is_recurrent:
            raise StageError(
                f"these layers can't go back to position {start}",
                "they keep a sum over all that they have seen",
                "start the session again from its first token",
            )
        for layer in self._own:
            if layer.get_seq_length() > start:
                layer.crop(start - layer.get_seq_length())


def is_recurrent(layer: Any) -> bool:
    """Whether a layer's state is the sum of all that it saw, which can't be cut back."""
    return type(_remembering(layer)) not in _CUTTABLE


def _remembering(layer: Any) -> Any:
    kind = _FORGETFUL.get(type(layer))
    return layer if kind is None else kind()


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
