"""A cluster's API, as the commands ask it."""

from __future__ import annotations

from typing import Any

import httpx

from core.cli.api_options import KEY_VARIABLE, own_headers
from core.errors import ConfigError, CoreError
from core.trust.addresses import is_loopback


def api_client(url: str, timeout: float) -> httpx.AsyncClient:
    """A client of the API at --url that sends the user's key along. Raises ConfigError for what is no address."""
    return httpx.AsyncClient(timeout=timeout, **_told(url))


def blocking_client(url: str, timeout: httpx.Timeout) -> httpx.Client:
    """The same for a program that does one thing at a time."""
    return httpx.Client(timeout=timeout, **_told(url))


def _told(url: str) -> dict[str, Any]:
    try:
        address = httpx.URL(url.rstrip("/"))
    except httpx.InvalidURL:
        address = httpx.URL()
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(f"--url {url!r} is no address", "", "give it as http://127.0.0.1:8000")
    # No proxy that the environment names leads to this machine.
    return {"base_url": address, "headers": own_headers(), "trust_env": not is_loopback(address.host)}


async def ask(client: httpx.AsyncClient, method: str, path: str, field: str) -> dict[str, Any]:
    """The object, which has `field`, that the API answers with.

    Raises ConfigError for a key that it does not take, and CoreError where it refuses, or is no cluster's.
    """
    try:
        answer = await client.request(method, path)
    except httpx.HTTPError as error:
        raise no_answer(client.base_url, error) from error
    return checked(answer, field)


def no_answer(url: httpx.URL, error: httpx.HTTPError) -> CoreError:
    return CoreError(f"no answer from {url}", str(error) or type(error).__name__, "is `core serve` running there?")


def checked(answer: httpx.Response, field: str) -> dict[str, Any]:
    """The object, which has `field`, of an answer that was read. Raises as `ask` does."""
    asked, url = answer.request, answer.request.url.copy_with(raw_path=b"/")
    if answer.status_code == 401:
        hint = f"set {KEY_VARIABLE} to one that the host made with `core keys add NAME`"
        raise ConfigError("the API key is missing or wrong", "", hint)
    body = _json(answer)
    if answer.status_code == 200 and isinstance(body, dict) and field in body:
        return body
    match body:
        case {"error": {"message": str(message)}} if answer.status_code != 404:
            raise CoreError(f"{url} answers with an error", message)
    raise CoreError(
        f"{url} is no cluster",
        f"{asked.method} {asked.url.path} answered with status {answer.status_code} and something else",
        "give --url the address of a `core serve`",
    )


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None
