"""What a node holds of models, for all its hops: which layers stay, and which make room for others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from core.errors import StageError
from core.protocol.fields import Holding, Span
from core.runtime.device import free_memory, give_back_memory
from core.runtime.held_layers import HeldLayers, Variant
from core.runtime.kv_room import KVRoom

KV_SHARE = 0.9
"""Of the memory that is free beside the layers, for KV caches: batches need room as well."""
_TOLD = 16
_TOLD_SPANS = 128
"""How many holdings, and spans of each, the wire has room for."""


Held = tuple[Variant, int]


class Uses(NamedTuple):
    """Layers that a hop needs, or the coordinator wants kept."""

    variant: Variant
    layers: range


class LayerKeeper:
    """Layers stay after their hop, until the coordinator keeps others, they are in the way, or it is gone for long.

    `make_room` is called from the thread that loads, all else from trio's.
    """

    def __init__(self, device: torch.device, max_memory: int | None, *, compiled: bool) -> None:
        self.held = HeldLayers()
        self.caches = KVRoom(0)
        """What the caches of all hops may take: as much as was told last, and nothing before any was told."""
        self._device = device
        self._max_memory = max_memory
        self._compiled = compiled
        self._uses: dict[int, Uses] = {}
        self._named: list[Uses] = []

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    def use(self, hop: int, variant: Variant, layers: range) -> None:
        self._uses = {**self._uses, hop: Uses(variant, layers)}

    def release(self, hop: int) -> None:
        self._uses = {other: uses for other, uses in self._uses.items() if other != hop}

    def name(self, variant: Variant, layers: range) -> None:
        """They stay until `keep` says otherwise, and make room last."""
        self._named = [*self._named, Uses(variant, layers)]

    def keep(self, holdings: Iterable[Holding]) -> bool:
        """Lets go of all that is neither used nor in `holdings`. Whether there was any."""
        self._named = [
            Uses(Variant(holding.manifest, holding.quant, holding.dtype, self._compiled), range(span.start, span.end))
            for holding in holdings
            for span in holding.layers
        ]
        unwanted = [held for held in self._unused() if not _is_among(held, self._named)]
        for variant, layer in unwanted:
            self.held.drop(variant, layer)
        return bool(unwanted)

    def make_room(self, nbytes: int) -> None:
        """Lets go of layers that no hop uses, those that nobody named first, until `nbytes` fit beside the others.

        Raises StageError where they can't, within the user's bound.
        """
        lacking = nbytes - self._room()
        named = self._named
        unused = sorted(self._unused(), key=lambda held: _is_among(held, named))
        dropped = False
        for variant, layer in unused:
            if lacking <= 0:
                break
            lacking -= self.held.drop(variant, layer)
            dropped = True
        if dropped:
            give_back_memory(self._device)
        if nbytes > max(0, self.bound - self.caches.taken):
            raise StageError(
                f"{nbytes} bytes of layers do not fit beside the {self.nbytes + self.caches.taken} that are in use",
                f"this node offers {self._max_memory} bytes",
                "offer more memory, or let the other routes of this node end first",
            )

    def holdings(self) -> list[Holding]:
        return [
            Holding(variant.manifest, variant.quant, variant.dtype, [Span(span.start, span.stop) for span in spans])
            for variant, all_spans in list(self.held.spans().items())[:_TOLD]
            if (spans := all_spans[:_TOLD_SPANS])
        ]

    def kv_room(self, cached: int) -> int:
        """Bytes of KV caches that fit beside all layers that are held, those `cached` now included."""
        free = free_memory(self._device) + cached
        usable = int(free * KV_SHARE)
        return int(min(usable, self.bound))

    @property
    def bound(self) -> float:
        """Bytes that the user lets be filled beside the layers that are held; infinity if they said nothing of it."""
        return math.inf if self._max_memory is None else max(0, self._max_memory - self.nbytes)

    def _room(self) -> int:
        free = free_memory(self._device)
        return int(min(free, self.bound - self.caches.taken))

    def _unused(self) -> list[Held]:
        used = list(self._uses.values())
        return [held for held in self.held.all() if not _is_among(held, used)]


def _is_among(held: Held, uses: Iterable[Uses]) -> bool:
    variant, layer = held
    return any(variant == each.variant and layer in each.layers for each in uses)
