"""The C library's allocator, where it would keep what was let go of."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h."""
_LARGE = 1 << 20
_KEPT = 64 << 20


def return_large_blocks() -> None:
    """Has glibc return each block of a megabyte or more to the system as soon as it is freed.

    Left to itself, glibc raises that bound to the largest block that was freed, up to 32 MB. The weights that stay
    then lie between the holes of those that were only read, and a node held 30% more than its shard. Other
    C libraries return large blocks in any case.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _KEPT)
