"""Which layers this machine has read before, and has the files of still; and how fast they come from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from core.protocol.fields import OnDisk, Span
from core.runtime.held_layers import as_ranges
from core.runtime.kept_file import KeptFile

MIN_READ_BYTES = 16 << 20
"""A shorter read says little of a long one."""
_MANIFESTS, _SPANS = 16, 128
"""How many manifests are remembered, and spans of each told."""


class _Copy(msgspec.Struct):
    """Of one checkpoint: how many bytes its files have by their paths, and the files that each layer is in."""

    sizes: dict[str, int] = {}
    layers: dict[int, list[str]] = {}


class _Record(msgspec.Struct):
    speed: int = 0
    copies: dict[str, _Copy] = {}


class DiskRecord:
    """A small file in the user's cache, written by the one thread that loads. `told` and `speed` may be read from any.

    `told`: as of the last `look` or `note`. `speed`: bytes of a checkpoint in a second, read and packed; 0 if unknown.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = KeptFile("on_disk.json", _Record, path)
        self.told: list[OnDisk] = []
        self.speed = 0

    def look(self) -> None:
        """Which of the files are still there."""
        self._tell(self._file.read() or _Record())

    def note(self, manifest: bytes, files: Mapping[int, Sequence[Path]], nbytes: int, seconds: float) -> None:
        """The layers of `manifest` that are in these `files` were read just now: so many bytes of them in all."""
        record = self._file.read() or _Record()
        copy = record.copies.pop(manifest.hex(), _Copy())
        record.copies[manifest.hex()] = copy  # the newest last
        copy.sizes.update({str(path): _size(path) for paths in files.values() for path in paths})
        copy.layers.update({layer: [str(path) for path in paths] for layer, paths in files.items()})
        record.copies = dict(list(record.copies.items())[-_MANIFESTS:])
        if nbytes >= MIN_READ_BYTES and seconds > 0:
            found = int(nbytes / seconds)
            record.speed = (record.speed + found) // 2 if record.speed else found
        self._file.write(record)
        self._tell(record)

    def _tell(self, record: _Record) -> None:
        told = [OnDisk(bytes.fromhex(manifest), _spans(copy)) for manifest, copy in record.copies.items()]
        self.told, self.speed = [each for each in told if each.layers], record.speed


def _spans(copy: _Copy) -> list[Span]:
    there = {path for path, size in copy.sizes.items() if _size(Path(path)) == size}
    layers = [layer for layer, paths in copy.layers.items() if paths and there.issuperset(paths)]
    return [Span(span.start, span.stop) for span in as_ranges(layers)[:_SPANS]]


def _size(path: Path) -> int:
    """-1 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
