"""Layers that a process holds once, whatever is built of them: packed weights, by checkpoint, packing and layer.

A stack is built of parts: what an architecture asks its Weights for. They are kept here by how they were asked for, so
that another stack of the same layers is built without reading or packing anything, whatever its family and range.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, ...]
"""How a part was asked for, and of what."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor, a packed weight, or what was made of tensors; `names` are the tensors that were read for it."""

    value: Any
    nbytes: int
    names: tuple[str, ...]


Parts = dict[Key, Part]


@dataclass(frozen=True, slots=True)
class Variant:
    """What layers have in common that can be in one stage: the checkpoint, and how its weights are packed."""

    manifest: bytes
    quant: str
    dtype: str
    compiled: bool = False


@dataclass(slots=True)
class _Held:
    """A variant's layers: the keys of each one's parts, and what each was proven to be."""

    parts: Parts = field(default_factory=dict)
    keys: dict[int, frozenset[Key]] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)
    parity: dict[int | None, dict[str, bytes]] = field(default_factory=dict)


class HeldLayers:
    """Any thread may call: each call does all that it does, or nothing."""

    def __init__(self) -> None:
        self._variants: dict[Variant, _Held] = {}
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(part.nbytes for held in self._variants.values() for part in held.parts.values())

    def spans(self) -> dict[Variant, list[range]]:
        """The layers that are held, as ranges."""
        with self._lock:
            return {variant: as_ranges(held.keys) for variant, held in self._variants.items() if held.keys}

    def all(self) -> list[tuple[Variant, int]]:
        """In the order in which they came."""
        with self._lock:
            return [(variant, layer) for variant, held in self._variants.items() for layer in held.keys]

    def missing(self, variant: Variant, layers: range) -> list[int]:
        with self._lock:
            held = self._variants.get(variant, _Held())
            return [layer for layer in layers if layer not in held.keys]

    def parts(self, variant: Variant, layers: range) -> Parts:
        """Those of `layers` that are held, for `Model.load_stage` to add to."""
        with self._lock:
            held = self._variants.get(variant, _Held())
            keys = {key for layer in layers for key in held.keys.get(layer, ())}
            return {key: held.parts[key] for key in keys}

    def other_layer(self, variant: Variant, layers: range, digests: Sequence[bytes]) -> int | None:
        """The first of `layers` that is held and was proven to be something else than its one of `digests`.

        An empty digest is not known, and tells nothing.
        """
        with self._lock:
            held = self._variants.get(variant, _Held())
            for layer, digest in zip(layers, digests, strict=True):
                if digest and held.digests.get(layer) not in (None, b"", digest):
                    return layer
            return None

    def add(
        self, variant: Variant, parts: Mapping[Key, Part], names: Mapping[int, Sequence[str]], digests: Sequence[bytes]
    ) -> None:
        """Holds the layers that `names` has the tensors of, each proven to be its one of `digests`."""
        with self._lock:
            held = self._variants.setdefault(variant, _Held())
            for (layer, tensors), digest in zip(names.items(), digests, strict=True):
                own = frozenset(tensors)
                held.keys[layer] = frozenset(key for key, part in parts.items() if own.intersection(part.names))
                held.digests[layer] = digest
                held.parts.update((key, parts[key]) for key in held.keys[layer])

    def drop(self, variant: Variant, layer: int) -> int:
        """Lets go of a layer. Returns how many bytes were held by it alone: 0 of one that somebody else let go of."""
        with self._lock:
            held = self._variants.get(variant)
            if held is None or layer not in held.keys:
                return 0
            alone = held.keys.pop(layer).difference(*held.keys.values())
            freed = sum(held.parts.pop(key).nbytes for key in alone)
            del held.digests[layer]
            held.parity.pop(layer, None)
            if not held.keys:
                del self._variants[variant]
            return freed

    def parity(self, variant: Variant, layer: int | None) -> dict[str, bytes] | None:
        """What was computed with the held `layer` on fixed inputs; None: by operations, without a layer."""
        with self._lock:
            return self._variants.get(variant, _Held()).parity.get(layer)

    def remember(self, variant: Variant, parity: Mapping[int | None, dict[str, bytes]]) -> None:
        """For as long as the variant, and the layer, are held."""
        with self._lock:
            held = self._variants.get(variant, _Held())
            held.parity.update({layer: found for layer, found in parity.items() if layer is None or layer in held.keys})


def as_ranges(layers: Iterable[int]) -> list[range]:
    runs: defaultdict[int, list[int]] = defaultdict(list)
    for place, layer in enumerate(sorted(layers)):
        runs[layer - place].append(layer)
    return [range(run[0], run[-1] + 1) for run in runs.values()]
