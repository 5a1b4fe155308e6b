"""The web application."""

from __future__ import annotations

from litestar import Litestar

from core.gateway.bridge import Bridge
from core.gateway.errors import answer_error
from core.gateway.routes import Gateway, chat_completions, cluster, completions, health, model, models
from core.interfaces.engine import Engine

BODY_LIMIT = 10 * 1024 * 1024


def create_app(engine: Engine, bridge: Bridge) -> Litestar:
    """The application that serves `engine`; called in trio, as everything of the engine is."""
    app = Litestar(
        [models, model, completions, chat_completions, health, cluster],
        exception_handlers={Exception: answer_error},
        request_max_body_size=BODY_LIMIT,
        openapi_config=None,
        logging_config=None,
        debug=False,
        pdb_on_exception=False,
    )
    app.state.gateway = Gateway(engine, bridge, engine.served_model, engine.created)
    return app
