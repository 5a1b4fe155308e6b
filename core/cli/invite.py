"""`core invite`: a link that lets one machine into the cluster, once."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from core.cli.console import aligned
from core.cli.options import StateDirectory, one_of
from core.errors import ConfigError

if TYPE_CHECKING:
    from core.trust.link import InviteLink
    from core.trust.register import Invite, Register

_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
_LONGEST_SECONDS = 365 * 86_400


def invite(
    expires: Annotated[str, typer.Option(help="How long it can be used: 30m, 24h, 7d.")] = "24h",
    name: Annotated[str, typer.Option(help="What the machine will be called. Default: its own name.")] = "",
    show: Annotated[bool, typer.Option("--list", help="List the invites instead.")] = False,
    revoke: Annotated[str | None, typer.Option(metavar="ID", help="Make an invite useless instead.")] = None,
    state_dir: StateDirectory = None,
) -> None:
    """Invite one machine with a link. It is printed, as a QR code too; whoever uses it first can join."""
    from core.trust.invite import new_invite
    from core.trust.register import Register
    from core.trust.serving import is_serving
    from core.trust.state_dir import StateDir

    one_of({"--list": show, "--revoke": revoke, "--name": name})
    state = StateDir.open(state_dir)
    if show:
        print(list_invites(Register(state)))
    elif revoke is not None:
        Register(state).revoke(revoke)
        print(f"invite {revoke} is revoked")
    else:
        made, link = new_invite(state, seconds_of(expires), name)
        print_invite(made, link, joinable=is_serving(state))


def seconds_of(text: str) -> int:
    """Raises ConfigError for what is no length of time, or longer than a year."""
    found = re.fullmatch(r"(\d{1,6})([mhd])", text.strip())
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise ConfigError(
            f"--expires {text!r} is no time that an invite can last", "", "30m, 24h or 7d; a year at most"
        )
    return seconds


def print_invite(made: Invite, link: InviteLink, *, joinable: bool) -> None:
    """The QR code is tall: what matters stands below it, the warning first."""
    import segno

    from core.trust.identity import short_id

    if sys.stdout.isatty():
        segno.make(str(link), error="l").terminal(compact=True)
    if not joinable:
        warning = (
            "WARNING nobody can join yet: no coordinator serves friends here."
            " End the core serve that runs here, if one does, and start it so:\n        "
        )
        command = f"core serve --model ... --node-host 0.0.0.0 --node-port {link.port}"
        typer.secho(f"{warning}{command}\n", fg="yellow", err=True)
    who = f" as {made.name}" if made.name else ""
    print(f"{link}\n")
    print(f"invite {made.id} lets one machine in{who}, until {when(link.expires)}")
    print(f"it leads to {', '.join(link.hosts)}, port {link.port}; the key there is {short_id(link.fingerprint)}")
    print(
        "your friend runs core node --join - and pastes it, or opens it in the tray app (core-node), which asks first"
    )
    print("whoever joins can read what is asked and answered: invite people who may")


def list_invites(register: Register) -> str:
    entries = register.read()
    names = {node.fingerprint: node.node_id for node in entries.nodes}
    rows = [
        (invite.id, invite.state, when(invite.expires), invite.name or "-", names.get(invite.used_by, "-"))
        for invite in entries.invites
    ]
    return aligned(("ID", "STATE", "EXPIRES", "NAME", "USED BY"), *rows) if rows else "no invites"


def when(seconds: int) -> str:
    """A moment, in the time of here."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
