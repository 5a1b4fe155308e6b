"""How a node comes by its membership: from an invite, wherever that is, or from an earlier one."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import ConfigError

if TYPE_CHECKING:
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


def read_link(join: str | None) -> str | None:
    """The invite that `join` leads to, or that the environment has, which loses it."""
    in_environment = os.environ.pop(JOIN, None)
    if join is None:
        return in_environment
    if join == "-":
        return sys.stdin.readline()
    if join.startswith("core:"):
        _log.warning("others on this machine can see an invite on a command line: give a file, -, or %s", JOIN)
        return join
    try:
        return Path(join).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"no invite in {join}", str(error), "give a file that holds the link") from None
