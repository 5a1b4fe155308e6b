"""Whoever says that it computes faster than it does is taken to be as slow as it is seen to be.

The coordinator measures what a token takes in all. Where that is much more than all figures explain, one of them is
wrong, and whoever claims to be the fastest is doubted first: so a node that claims what can't be pays for it, and
nobody else does. Whoever was doubted and does not serve is given another chance after a while.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from core.coordinator.hop import Hop
from core.coordinator.members import Member
from core.coordinator.speeds import Speeds

UNEXPLAINED = 2.0
"""By which factor a token must take longer than predicted before somebody's word is not taken."""
MIN_UNEXPLAINED_SECONDS = 0.005
HOLD_SECONDS = 30.0
FORGIVE_SECONDS = 1800.0
_log = logging.getLogger(__name__)


class Excess:
    """Charges members with what a token takes beyond what they say, and lets go of it when they are faster again."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._since = math.inf

    def forgive(self, members: Sequence[Member], now: float) -> bool:
        """Whether somebody is given another chance."""
        forgiven = [one for one in members if one.excess and not one.hops and now - one.charged_at >= FORGIVE_SECONDS]
        for member in forgiven:
            member.excess = 0.0
        return bool(forgiven)

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
            self._charge(min(hops, key=self._claim), unexplained, now)
        else:
            for hop in hops:
                hop.member.excess = 0.0
        return True

    def _charge(self, hop: Hop, seconds: float, now: float) -> None:
        member, nbytes = hop.member, self._speeds.read_bytes(hop.layers)
        member.excess, member.charged_at = member.excess + seconds / nbytes, now
        told = (member.node_id, nbytes / self._seconds(hop) / 1e9)
        _log.warning("node %s is slower than it says: a token reads %.3g GB/s of weights there, if so much", *told)

    def _seconds(self, hop: Hop) -> float:
        return sum(self._speeds.row_seconds(hop.member)[hop.layers.start : hop.layers.stop])

    def _claim(self, hop: Hop) -> float:
        """Seconds for a byte."""
        return self._seconds(hop) / self._speeds.read_bytes(hop.layers)
