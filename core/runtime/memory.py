"""The C library's allocator, where it would keep what was let go of."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h."""
_LARGE = 1 << 20
_LARGEST = 32 << 20
"""The highest bound that glibc takes."""
_KEPT = 64 << 20
_mapped = _LARGEST


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """While weights are loaded: glibc returns each block of a megabyte or more to the system as soon as it is freed.

    Left to itself, it raises that bound to the largest block that was freed, up to 32 MB. The weights that stay then
    lie between the holes of those that were only read, and a node held 30% more than its shard. Afterwards it keeps
    such blocks for the next that are asked for: a batch asks for the same few each time, and every page of one that
    is mapped anew faults again. Other C libraries return large blocks in any case.
    """
    with _mapped_from(_LARGE):
        yield


def large_blocks_kept() -> AbstractContextManager[None]:
    """While kernels are timed as weights are loaded: as it is afterwards."""
    return _mapped_from(_LARGEST)


@contextmanager
def _mapped_from(size: int) -> Iterator[None]:
    global _mapped
    before, _mapped = _mapped, size
    _set_bounds(_mapped)
    try:
        yield
    finally:
        _mapped = before
        _set_bounds(_mapped)


def _set_bounds(mapped: int) -> None:
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_MMAP_THRESHOLD, mapped)
        mallopt(_TRIM_THRESHOLD, _KEPT)
