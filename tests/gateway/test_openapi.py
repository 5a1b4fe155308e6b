"""The API's own description: valid, complete, and what the server holds to, whatever it is sent."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, Phase, given, settings
from litestar.routes import HTTPRoute
from openapi_spec_validator import validate
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from core.gateway.app import ROUTES, create_app
from core.gateway.bridge import Bridge
from core.gateway.openapi import document
from core.gateway.settings import ApiSettings
from core.interfaces.engine import Delta, TokenLogprob

EXAMPLES = 60
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def paths_and_methods(described: dict[str, Any]) -> set[tuple[str, str]]:
    return {(path, method) for path, operations in described["paths"].items() for method in operations}


@pytest.mark.parametrize("keys_needed", [False, True])
def test_the_document_is_valid(keys_needed: bool) -> None:
    validate(json.loads(document(ROUTES, keys_needed)))


async def test_every_route_is_described(engine: Any, nursery: trio.Nursery) -> None:
    app = create_app(engine, Bridge(nursery), ApiSettings())
    routed = {
        (route.path_format, method.lower())
        for route in app.routes
        if isinstance(route, HTTPRoute)
        for method in route.methods - {"OPTIONS"}
    }
    assert paths_and_methods(json.loads(app.state.openapi)) == routed


async def test_it_is_served(client: httpx.AsyncClient) -> None:
    response = await client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    described = response.json()
    operation = described["paths"]["/v1/chat/completions"]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "`store` null or false" in described["components"]["schemas"]["ChatBody"]["description"]
    roles = described["components"]["schemas"]["ChatBody"]["properties"]["messages"]["items"]["discriminator"]
    assert {"system", "developer", "user", "assistant"} <= set(roles["mapping"])


@pytest.mark.parametrize(("path", "method"), sorted(paths_and_methods(json.loads(document(ROUTES, False)))))
async def test_the_server_answers_as_it_says(address: tuple[str, int], engine: Any, path: str, method: str) -> None:
    token = TokenLogprob(7, "x", b"x", -0.5, (TokenLogprob(7, "x", b"x", -0.5),))
    engine.script = [Delta("x", 1, "stop", (token,))]
    engine.prompt_logprobs = (TokenLogprob(7, "x", b"x", None),)
    url = f"http://{address[0]}:{address[1]}"

    def ask() -> None:
        operation = schemathesis.openapi.from_url(f"{url}/openapi.json")[path][method]

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def hold(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "org/tiny"
            case.call_and_validate(checks=CHECKS)

        hold()

    with trio.fail_after(300):
        await trio.to_thread.run_sync(ask)
