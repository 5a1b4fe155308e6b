"""Whoever says that it computes faster than it does is taken to be as slow as it is seen to be.

The coordinator measures what a token takes in all. Where that is much more than all figures explain, one of them is
wrong, and those who claim to be the fastest are doubted first: so a node that claims what can't be pays for itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from core.coordinator.hop import Hop
from core.coordinator.speeds import Speeds

UNEXPLAINED = 2.0
"""By which factor a token must take longer than predicted before somebody's word is not taken."""
MIN_UNEXPLAINED_SECONDS = 0.005
HOLD_SECONDS = 30.0
_log = logging.getLogger(__name__)


class Excess:
    """Charges members with what a token takes beyond what they say, and lets go of it when they are faster again."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._since = math.inf

    def note(self, hops: Sequence[Hop], measured: float, predicted: float, now: float) -> bool:
        """A token takes `measured` seconds on the route of `hops`, and is predicted to take `predicted` (0: nobody can
        say). Whether somebody's figures were corrected."""
        unexplained = measured - predicted
        charged = any(hop.member.excess for hop in hops)
        wrong = predicted and abs(unexplained) >= MIN_UNEXPLAINED_SECONDS
        if not (wrong and (measured >= UNEXPLAINED * predicted or (charged and predicted >= UNEXPLAINED * measured))):
            self._since = math.inf
            return False
        self._since = min(self._since, now)
        if now - self._since < HOLD_SECONDS:
            return False
        self._since = math.inf
        if unexplained > 0:
            self._charge(hops, unexplained)
        else:
            for hop in hops:
                hop.member.excess = 0.0
        return True

    def _charge(self, hops: Sequence[Hop], seconds: float) -> None:
        """Raises those who need the fewest seconds for a byte to one level, so that all `seconds` are explained."""
        read = {hop: self._speeds.read_bytes(hop.layers) for hop in hops}
        rates = {hop: self._rate(hop) for hop in hops}
        level, raised, nbytes = 0.0, list[Hop](), 0
        for hop in sorted(hops, key=rates.__getitem__):
            if raised and rates[hop] >= level:
                break
            raised.append(hop)
            nbytes += read[hop]
            level = (seconds + sum(rates[each] * read[each] for each in raised)) / nbytes
        for hop in raised:
            hop.member.excess += level - rates[hop]
            told = (hop.member.node_id, 1 / level / 1e9)
            _log.warning("node %s is slower than it says: a token reads at most %.3g GB/s of weights there", *told)

    def _rate(self, hop: Hop) -> float:
        return sum(self._speeds.row_seconds(hop.member)[hop.layers.start : hop.layers.stop]) / self._speeds.read_bytes(
            hop.layers
        )
