"""The endpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import trio
from litestar import Response, get, post
from litestar.types import ASGIApp

from core.errors import NotReady, RequestError
from core.gateway.access import OPEN
from core.gateway.answers.answer import Answer
from core.gateway.answers.chat import ChatFormatter
from core.gateway.answers.completions import CompletionFormatter
from core.gateway.answers.formatter import Formatter
from core.gateway.bodies import AnyRequest, read
from core.gateway.bridge import Bridge
from core.gateway.dialects.as_text import as_text
from core.gateway.dialects.dialect import Dialect, template_options
from core.gateway.dialects.forms import ToolSettings
from core.gateway.dialects.template import template_of
from core.gateway.dialects.thinking import Thinking
from core.gateway.errors import MODEL_NOT_FOUND, NO_EMBEDDINGS, RETRY_AFTER, ErrorBody, naming_fields
from core.gateway.memory import ResponseMemory
from core.gateway.openapi import DOCUMENTED, Documentation
from core.gateway.pulse import Pulse
from core.gateway.schemas.anthropic import CountBody, MessagesBody
from core.gateway.schemas.chat import ChatBody, ChatChunk, ChatCompletion
from core.gateway.schemas.common import Body
from core.gateway.schemas.completions import Completion, CompletionBody
from core.gateway.schemas.models import Health, Model, Models, Rebalancing, Waiting
from core.gateway.schemas.ollama import OllamaBody
from core.gateway.schemas.responses import InputBody, ResponseBody
from core.gateway.schemas.tokens import DetokenizeBody, Detokenized, TokenizeBody, Tokenized
from core.interfaces.engine import ClusterStatus, Conversation, Engine, GenerationRequest, ModelCard


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the endpoints work with; `model` and `created` were read from the engine in trio.

    `max_time` bounds every request, in seconds; `memory` has responses that later requests may refer to, and
    `tools` is what the host says of them.
    """

    engine: Engine
    bridge: Bridge
    model: str
    created: int
    max_time: float
    memory: ResponseMemory
    tools: ToolSettings
    pulse: Pulse

    def check(self, model: str | None) -> None:
        if model not in (self.model, None):
            raise RequestError(
                f"the model {model!r} does not exist here",
                hint=f"this cluster serves {self.model!r}",
                param="model",
                code=MODEL_NOT_FOUND,
            )

    async def deadline(self, asked: float | None) -> float:
        """When the time is up, by trio's clock, of a request that has just come and asks for so many seconds."""
        seconds = min(asked or math.inf, self.max_time)
        return seconds if math.isinf(seconds) else await self.bridge.call(trio.current_time) + seconds

    def answer(
        self,
        body: Body | ResponseBody | MessagesBody | OllamaBody,
        requests: tuple[GenerationRequest, ...],
        formatter: Formatter,
        dialect: Dialect | None = None,
    ) -> Answer:
        if dialect is None:
            return Answer(self.engine, self.bridge, requests, formatter, body.stream, body.names)
        asked = tuple(map(dialect.ask, requests))
        names = {**body.names, **dialect.names}
        return Answer(self.engine, self.bridge, asked, formatter, body.stream, names)

    async def card(self) -> ModelCard:
        return await self.bridge.call(self.engine.card)

    async def dialect(
        self,
        body: ChatBody | InputBody | CountBody | OllamaBody,
        prompt: str | tuple[int, ...] | Conversation,
        client: str,
    ) -> Dialect:
        """The dialect of what `client` asks for by `body`, with `prompt` or with several that end alike.

        Raises RequestError for wishes that the model can't honour, NotReady before it is open.
        """
        wishes, card = body.wishes(), await self.card()
        chosen = card.tool_template if wishes.functions else card.chat_template
        if chosen is None:
            raise RequestError(
                "this model has no chat template",
                "it continues text and takes no messages",
                "use /v1/completions with a prompt",
                param=body.names["prompt"],
            )
        template = template_of(chosen, self.tools)
        dialect = Dialect(template, wishes, template_options(template, wishes))
        if template.thinks and isinstance(prompt, Conversation):
            told = dialect.told(prompt)
            with naming_fields(body.names):
                dialect.thinking = Thinking.after(await self.bridge.call(self.engine.prompt_end, told, client))
        return dialect

    async def count(self, body: InputBody | CountBody, conversation: Conversation, client: str) -> int:
        """How many tokens the prompt has that `conversation`, which is `body`'s, becomes."""
        prompt = (await self.dialect(body, conversation, client)).told(conversation)
        with naming_fields(body.names):
            tokens: tuple[int, ...] = await self.bridge.call(self.engine.tokenize, prompt, client)
        return len(tokens)

    async def told(self, prompt: str | Conversation) -> str | Conversation:
        """`prompt` as a generation of it would be told to the model."""
        chosen = (await self.card()).tool_template
        if chosen is None or not isinstance(prompt, Conversation):
            return prompt
        return as_text(prompt) if template_of(chosen, self.tools).tools_as_text else prompt

    async def status(self) -> ClusterStatus:
        return await self.bridge.call(self.engine.status)

    async def described(self) -> Model:
        try:
            length = (await self.card()).context_length
        except NotReady:
            length = None
        return Model(id=self.model, created=self.created, max_model_len=length)


def gateway_of(request: AnyRequest) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


@get("/v1/models", opt={DOCUMENTED: Documentation(Models)})
async def models(request: AnyRequest) -> Models:
    """Lists the one model."""
    return Models(data=[await gateway_of(request).described()])


@get("/v1/models/{name:path}", opt={DOCUMENTED: Documentation(Model)})
async def model(request: AnyRequest) -> Model:
    """Describes the model; slashes in its name may stand as they are."""
    gateway = gateway_of(request)
    gateway.check(request.path_params["name"].removeprefix("/"))
    return await gateway.described()


@post("/v1/chat/completions", status_code=200, opt={DOCUMENTED: Documentation(ChatCompletion, ChatBody, (ChatChunk,))})
async def chat_completions(request: AnyRequest) -> ASGIApp:
    """Continues a conversation."""
    gateway, body = gateway_of(request), await read(request, ChatBody)
    gateway.check(body.model)
    requests = body.generations(request.auth, await gateway.deadline(body.max_time))
    dialect = await gateway.dialect(body, requests[0].prompt, request.auth)
    return gateway.answer(body, requests, ChatFormatter(gateway.model, body, len(requests), dialect), dialect)


@post("/v1/completions", status_code=200, opt={DOCUMENTED: Documentation(Completion, CompletionBody, (Completion,))})
async def completions(request: AnyRequest) -> ASGIApp:
    """Continues texts."""
    gateway, body = gateway_of(request), await read(request, CompletionBody)
    gateway.check(body.model)
    requests = body.generations(request.auth, await gateway.deadline(body.max_time))
    echoes = [await _text(gateway, prompt, request.auth) for prompt in body.prompts()] if body.echo else []
    return gateway.answer(body, requests, CompletionFormatter(gateway.model, body, len(requests), echoes))


async def _text(gateway: Gateway, prompt: str | tuple[int, ...], client: str) -> str:
    if isinstance(prompt, str):
        return prompt
    with naming_fields({"tokens": "prompt"}):
        return await gateway.bridge.call(gateway.engine.detokenize, prompt, client)


@post("/v1/embeddings", opt={DOCUMENTED: Documentation(others={404: ErrorBody})})
async def embeddings(request: AnyRequest) -> None:
    """Says that there are none: the model writes text."""
    raise RequestError(
        "this server makes no embeddings",
        f"{gateway_of(request).model!r} is a model that writes text",
        "ask a server of an embedding model",
        code=NO_EMBEDDINGS,
    )


@post("/tokenize", status_code=200, opt={DOCUMENTED: Documentation(Tokenized, TokenizeBody)})
async def tokenize(request: AnyRequest) -> Tokenized:
    """Tells the tokens of a prompt."""
    gateway, body = gateway_of(request), await read(request, TokenizeBody)
    gateway.check(body.model)
    text = await gateway.told(body.text())
    with naming_fields(body.names):
        tokens: tuple[int, ...] = await gateway.bridge.call(gateway.engine.tokenize, text, request.auth)
    return Tokenized(len(tokens), (await gateway.card()).context_length, tokens)


@post("/detokenize", status_code=200, opt={DOCUMENTED: Documentation(Detokenized, DetokenizeBody)})
async def detokenize(request: AnyRequest) -> Detokenized:
    """Tells the text of tokens, special ones included."""
    gateway, body = gateway_of(request), await read(request, DetokenizeBody)
    gateway.check(body.model)
    return Detokenized(await gateway.bridge.call(gateway.engine.detokenize, body.tokens, request.auth))


@get("/health", opt={OPEN: True, DOCUMENTED: Documentation(Health, others={503: Waiting})})
async def health(request: AnyRequest) -> Response[Health | Waiting]:
    """Says whether a request would be served, and else what the cluster waits for."""
    status = await gateway_of(request).status()
    if status.state == "ready":
        return Response(Health())
    waiting = Waiting(status.state, status.detail, status.required_nodes, status.ready_nodes)
    return Response(waiting, status_code=503, headers=RETRY_AFTER)


@get("/v1/cluster", opt={DOCUMENTED: Documentation(ClusterStatus)})
async def cluster(request: AnyRequest) -> ClusterStatus:
    """Describes the cluster: its nodes, who holds which layers, and who is left out."""
    return await gateway_of(request).status()


@post("/v1/cluster/rebalance", status_code=200, opt={DOCUMENTED: Documentation(Rebalancing)})
async def rebalance(request: AnyRequest) -> Rebalancing:
    """Has a plan made with all nodes that are there, and says what becomes of it."""
    gateway = gateway_of(request)
    return Rebalancing(await gateway.bridge.call(gateway.engine.rebalance))


@get("/openapi.json", opt={DOCUMENTED: Documentation(dict[str, Any])})
async def openapi(request: AnyRequest) -> Response[bytes]:
    """Describes this API."""
    return Response(request.app.state.openapi, media_type="application/json")
