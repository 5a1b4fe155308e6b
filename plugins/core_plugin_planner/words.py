"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from core_plugin_planner.costs import NodeCosts

WORDS = 0.75
"""In a token, of English."""
MOST_DIGITS = 7
"""Of a millisecond, behind the point: a nanosecond has six."""


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


def milliseconds(nanoseconds: float, more: int = 0) -> str:
    """Two digits, or all those before the point: 0.31 ms, 4.2 ms, 37 ms, 1204 ms; and `more` behind it."""
    value = nanoseconds / 10**6
    digits = 0 if value >= 9.95 else 1 if value >= 0.995 else 2
    return f"{value:.{digits + more}f} ms"


def instead(now: float, then: float) -> str:
    """Nanoseconds with as many digits as tell them apart: 31 ms instead of 48 ms, 27.4 ms instead of 26.6 ms."""
    both = ((milliseconds(then, more), milliseconds(now, more)) for more in range(MOST_DIGITS))
    after, before = next((pair for pair in both if pair[0] != pair[1]), (milliseconds(then), milliseconds(now)))
    return f"{after} instead of {before}"


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
