"""Endpoints for the host alone: who may join, and what other machines would bring."""

from __future__ import annotations

import segno
from litestar import get, post

from core.gateway.access import HOST
from core.gateway.bodies import AnyRequest, read
from core.gateway.openapi import DOCUMENTED, Documentation
from core.gateway.routes import gateway_of
from core.gateway.schemas.hosting import DecisionBody, Done, InviteBody, Invited, RemoveBody, RevokeBody, WhatIfBody
from core.interfaces.engine import WhatIf
from core.interfaces.membership import Membership, MembershipStatus, NewInvite


def _membership(request: AnyRequest) -> Membership:
    return gateway_of(request).engine.membership


@get("/v1/cluster/members", opt={HOST: True, DOCUMENTED: Documentation(MembershipStatus)})
async def members(request: AnyRequest) -> MembershipStatus:
    """Lists the machines that were let in, those that ask to be, and the invites."""
    told: MembershipStatus = await gateway_of(request).bridge.call(_membership(request).status)
    return told


@post("/v1/cluster/invites", status_code=200, opt={HOST: True, DOCUMENTED: Documentation(Invited, InviteBody)})
async def invite(request: AnyRequest) -> Invited:
    """Makes a link that lets one machine in, once."""
    body = await read(request, InviteBody)
    made: NewInvite = await gateway_of(request).bridge.call(_membership(request).invite, body.seconds, body.name)
    return Invited(
        id=made.id, link=made.link, expires=made.expires, hosts=made.hosts, port=made.port, qr=_modules(made.link)
    )


@post("/v1/cluster/invites/revoke", status_code=200, opt={HOST: True, DOCUMENTED: Documentation(Done, RevokeBody)})
async def revoke(request: AnyRequest) -> Done:
    """Makes an open invite useless."""
    body = await read(request, RevokeBody)
    id: str = await gateway_of(request).bridge.call(_membership(request).revoke, body.id)
    return Done(f"invite {id} is revoked")


@post("/v1/cluster/members/decide", status_code=200, opt={HOST: True, DOCUMENTED: Documentation(Done, DecisionBody)})
async def decide(request: AnyRequest) -> Done:
    """Lets a machine in that asks to join, or sends it away."""
    body, gateway, membership = await read(request, DecisionBody), gateway_of(request), _membership(request)
    if body.decision == "approve":
        return Done(f"{await gateway.bridge.call(membership.approve, body.code)} is a member now")
    return Done(f"{await gateway.bridge.call(membership.deny, body.code)} is not let in")


@post("/v1/cluster/members/remove", status_code=200, opt={HOST: True, DOCUMENTED: Documentation(Done, RemoveBody)})
async def remove(request: AnyRequest) -> Done:
    """Turns a machine out, at once."""
    body = await read(request, RemoveBody)
    name: str = await gateway_of(request).bridge.call(_membership(request).remove, body.name)
    return Done(f"{name} is no member any more")


@post("/v1/cluster/what-if", status_code=200, opt={HOST: True, DOCUMENTED: Documentation(WhatIf, WhatIfBody)})
async def what_if(request: AnyRequest) -> WhatIf:
    """Says what would be planned without some nodes and with others, and what that would bring."""
    body, gateway = await read(request, WhatIfBody), gateway_of(request)
    answer: WhatIf = await gateway.bridge.call(gateway.engine.what_if, body.without, body.memory_of_others)
    return answer


def _modules(text: str) -> list[str]:
    return ["".join("1" if dark else "0" for dark in row) for row in segno.make_qr(text, error="l").matrix]
