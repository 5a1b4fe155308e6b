"""How a node comes by its membership: from an invite, wherever that is, by asking a host, or from an earlier one."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from core.cli.console import aligned, why
from core.errors import ConfigError, CoreError

if TYPE_CHECKING:
    from core.discovery.advert import Advert
    from core.trust.cluster import Membership
    from core.trust.state_dir import StateDir

JOIN = "CORE_JOIN"
"""The environment's invite."""
_log = logging.getLogger(__name__)


def find_membership(join: str | None, host: str | None, port: int | None, state: StateDir) -> Membership | None:
    """By an invite, or by one that was accepted before. None where the coordinator is on this machine, by `host`, or
    because no other is known."""
    from core.trust.addresses import is_this_machine
    from core.trust.cluster import Membership

    if join is None and host is not None and is_this_machine(host):
        return None
    link = read_link(join)
    membership = Membership.join(link, state) if link is not None else Membership.remembered(state)
    if membership is not None:
        membership.at(host, port)
    return membership


def ask(key: str | None, found: list[Advert], state: StateDir) -> Membership:
    """Of the cluster with this key, or of the only one that was found. Raises ConfigError where that is none,
    or several, and CoreError where nothing was found."""
    from core.trust.cluster import Membership

    wanted = [cluster for cluster in found if key in (None, cluster.key)]
    if not found:
        raise CoreError(
            "no cluster was found on the local network",
            "nothing announces itself",
            "core doctor says whether multicast works here; an invite does without it",
        )
    if not wanted:
        there = ", ".join(cluster.key for cluster in found)
        raise ConfigError(f"no cluster {key} was found", f"there are: {there}", "see core node --find")
    if len(wanted) > 1:
        raise ConfigError("several clusters were found", "one is to be chosen", "core node --ask KEY")
    return Membership.ask(wanted[0].cluster(), state)


def describe(found: list[Advert]) -> str:
    rows = [(cluster.name, cluster.key, f"{', '.join(cluster.hosts)} port {cluster.port}") for cluster in found]
    return aligned(("CLUSTER", "KEY", "WHERE"), *rows)


def read_link(join: str | None) -> str | None:
    """The invite that `join` leads to, or that the environment has, which loses it."""
    in_environment = os.environ.pop(JOIN, None)
    if join is None:
        return in_environment
    if join == "-":
        if sys.stdin.isatty():
            print("Paste the link that the host sent:", file=sys.stderr, flush=True)
        return sys.stdin.readline()
    if join.startswith("core:"):
        _log.warning("others on this machine can see an invite on a command line: give a file, -, or %s", JOIN)
        return join
    try:
        return Path(join).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"no invite in {join!r}", why(error), "give a file that holds the link") from None
