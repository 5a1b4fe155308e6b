"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from core_plugin_planner.costs import NodeCosts

WORDS = 0.75
"""In a token, of English."""


def counted(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def named(names: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def at_least(nbytes: int) -> str:
    """Rounded up, so that a need is never told too small."""
    return f"{-(-nbytes // 10**7) / 100:.2f} GB" if nbytes >= 10**8 else f"{-(-nbytes // 10**6)} MB"


def at_most(nbytes: int) -> str:
    """Rounded down, so that an offer is never told too large."""
    return f"{nbytes // 10**7 / 100:.2f} GB" if nbytes >= 10**8 else f"{nbytes // 10**6} MB"


def milliseconds(nanoseconds: float) -> str:
    """Two digits, or all those before the point: 0.31 ms, 4.2 ms, 37 ms, 1204 ms."""
    value = nanoseconds / 10**6
    digits = 0 if value >= 9.95 else 1 if value >= 0.995 else 2
    return f"{value:.{digits}f} ms"


def seconds(nanoseconds: float) -> str:
    """Two digits, or all those before the point: 0.31 s, 4.2 s, 37 s."""
    return milliseconds(nanoseconds / 1000).removesuffix("ms") + "s"


def words(nanoseconds: float) -> str:
    """How many words a second there are of tokens that take so long."""
    return per_second(nanoseconds / WORDS)


def per_second(nanoseconds: float) -> str:
    """How many things that take so long there are in a second."""
    return f"{10**9 / max(nanoseconds, 1):.2g}" if nanoseconds > 10**7 else f"{10**9 / max(nanoseconds, 1):.0f}"


def too_small(node: NodeCosts) -> str:
    """Why the node can't have any layer; empty if it can."""
    smallest = min(end - start for start, end in pairwise(node.takes))
    if node.memory >= smallest:
        return ""
    return f"too small: even one layer takes {at_least(smallest)} and it offers {at_most(node.memory)}"
