"""A new invite, from all that a coordinator's state directory says."""

from __future__ import annotations

from core.trust.identity import Identity
from core.trust.link import InviteLink
from core.trust.register import Invite, Register
from core.trust.serving import Serving, last_serving
from core.trust.state_dir import StateDir


def new_invite(state: StateDir, seconds: int, name: str = "") -> tuple[Invite, InviteLink]:
    """For one machine, called `name`. The link leads to the coordinator that serves with `state`, did last, or will.

    Raises ConfigError where others can't reach this machine.
    """
    serving = last_serving(state) or Serving()
    hosts = serving.reachable_hosts()
    invite, secret = Register(state).invite(seconds, name)
    fingerprint = Identity.open(state).fingerprint
    return invite, InviteLink(hosts, serving.port, fingerprint, secret, invite.expires, serving.transport)
