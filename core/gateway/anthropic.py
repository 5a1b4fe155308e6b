"""The endpoints of Anthropic's Messages API, for clients that know no other: the same engine, in its words."""

from __future__ import annotations

from litestar import post
from litestar.types import ASGIApp

from core.gateway.answers.messages import MessageFormatter
from core.gateway.bodies import AnyRequest, read
from core.gateway.errors import SHAPE, Failure
from core.gateway.openapi import DOCUMENTED, Documentation
from core.gateway.routes import gateway_of
from core.gateway.schemas.anthropic import CountBody, MessagesBody
from core.gateway.schemas.anthropic_objects import MessageEvent, MessageObject, TokenCount


@post(
    "/v1/messages",
    status_code=200,
    opt={SHAPE: Failure.anthropic_body, DOCUMENTED: Documentation(MessageObject, MessagesBody, (MessageEvent,))},
)
async def messages(request: AnyRequest) -> ASGIApp:
    """Continues a conversation, as Anthropic's API has it."""
    gateway, body = gateway_of(request), await read(request, MessagesBody)
    gateway.check(body.model)
    requests = (body.generation(request.auth, await gateway.deadline(body.max_time)),)
    dialect = await gateway.dialect(body, requests[0].prompt, request.auth)
    return gateway.answer(body, requests, MessageFormatter(gateway.model, body, dialect.reader()), dialect)


@post(
    "/v1/messages/count_tokens",
    status_code=200,
    opt={SHAPE: Failure.anthropic_body, DOCUMENTED: Documentation(TokenCount, CountBody)},
)
async def count_tokens(request: AnyRequest) -> TokenCount:
    """Counts the tokens of the prompt that messages would make, as Anthropic's API has it."""
    gateway, body = gateway_of(request), await read(request, CountBody)
    gateway.check(body.model)
    return TokenCount(await gateway.count(body, body.conversation(), request.auth))
