"""How much memory the KV caches of all stages of a device may take together: what was promised, and no more."""

from __future__ import annotations

import math

from core.errors import NoKVRoom


class KVRoom:
    """`limit` in bytes, `taken` what caches have of it. The compute thread takes and gives back; `promise` may be
    called from another thread."""

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.taken = 0

    def promise(self, nbytes: int, at_most: float = math.inf) -> None:
        """`nbytes` were told to those who fill caches. Caches that are there go by the largest promise made to them.

        Beyond `at_most` there is nothing, whatever was promised.
        """
        earlier = self.limit if self.taken else 0
        self.limit = min(max(nbytes, earlier), at_most)

    def take(self, nbytes: int) -> None:
        """Of a negative number, gives back. Raises NoKVRoom, and takes nothing, if there is no room."""
        if nbytes > 0 and self.taken + nbytes > self.limit:
            raise NoKVRoom(
                "there is no room for more KV cache",
                f"{nbytes} bytes were asked for beside {self.taken}, and {self.limit:g} are offered in all",
            )
        self.taken += nbytes
