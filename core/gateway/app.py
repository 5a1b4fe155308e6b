"""The web application."""

from __future__ import annotations

from litestar import Litestar
from litestar.config.cors import CORSConfig
from litestar.middleware import DefineMiddleware

from core.gateway import anthropic, hosting, ollama, page, responses, routes, watching
from core.gateway.access import Access, Callers
from core.gateway.bodies import BODY_LIMIT
from core.gateway.bridge import Bridge
from core.gateway.errors import answer_error
from core.gateway.memory import ResponseMemory
from core.gateway.openapi import document
from core.gateway.pulse import Pulse
from core.gateway.settings import ApiSettings
from core.interfaces.engine import Engine

ROUTES = (
    routes.models,
    routes.model,
    routes.chat_completions,
    routes.completions,
    responses.responses,
    responses.input_tokens,
    responses.response,
    responses.delete_response,
    anthropic.messages,
    anthropic.count_tokens,
    ollama.chat,
    ollama.generate,
    ollama.version,
    ollama.tags,
    ollama.ps,
    ollama.show,
    ollama.pull,
    ollama.embed,
    routes.embeddings,
    routes.tokenize,
    routes.detokenize,
    routes.health,
    routes.cluster,
    routes.rebalance,
    watching.events,
    watching.history,
    hosting.what_if,
    hosting.members,
    hosting.invite,
    hosting.revoke,
    hosting.decide,
    hosting.remove,
    watching.metrics,
    routes.openapi,
    page.page,
    page.page_part,
    page.me,
    page.login,
    page.logout,
)


def create_app(engine: Engine, bridge: Bridge, settings: ApiSettings) -> Litestar:
    """The application that serves `engine`; called in trio, as everything of the engine is."""
    cors, callers = _cors(settings.cors_origins), Callers(settings)
    app = Litestar(
        ROUTES,
        middleware=[DefineMiddleware(Access, callers=callers, cors=cors)],
        cors_config=cors,
        exception_handlers={Exception: answer_error},
        request_max_body_size=BODY_LIMIT,
        openapi_config=None,
        logging_config=None,
        debug=False,
        pdb_on_exception=False,
    )
    memory = ResponseMemory(settings.keep_responses)
    app.state.gateway = routes.Gateway(
        engine, bridge, engine.served_model, engine.created, settings.max_time, memory, settings.tools, Pulse(engine)
    )
    app.state.callers = callers
    app.state.openapi = document(ROUTES, keys_needed=callers.need_keys)
    return app


def _cors(origins: tuple[str, ...]) -> CORSConfig | None:
    if not origins:
        return None
    return CORSConfig(
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["retry-after"],
    )
