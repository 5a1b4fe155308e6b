"""Streams whose engine is silent for a while: comments keep them alive, and nothing else of them changes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import trio

from core.errors import Overloaded, RouteError
from core.gateway.answers import answer
from core.gateway.bridge import closing, with_silences
from core.interfaces.engine import Delta

WAITING = ": waiting"
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "org/tiny", "prompt": "hi"},
    "/v1/chat/completions": {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "org/tiny", "input": "hi"},
}

every_endpoint = pytest.mark.parametrize("path", ENDPOINTS)


@pytest.fixture
def pause(engine: Any) -> trio.Event:
    """What the engine waits for between its first two deltas."""
    event = trio.Event()
    engine.script = [Delta("Hello", 1), event, Delta(" world", 2, "stop")]
    return event


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "SILENCE", 0.001)


def without_ids(frame: str) -> str:
    """A frame as far as two answers to one request have it alike."""
    return re.sub(r'[0-9a-f]{24,}|(?<=_at":)\d+|(?<="created":)\d+', "", frame)


async def read(client: httpx.AsyncClient, path: str, pause: trio.Event) -> list[str]:
    """The lines of a streamed answer whose engine goes on after three comments."""
    lines, comments = [], 0
    async with client.stream("POST", path, json={**ENDPOINTS[path], "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines.append(line)
            comments += line == WAITING
            if comments == 3:
                pause.set()
    return lines


@pytest.mark.usefixtures("_impatient")
@every_endpoint
async def test_comments_come_while_it_is_silent(client: httpx.AsyncClient, pause: trio.Event, path: str) -> None:
    lines = await read(client, path, pause)
    assert lines.count(WAITING) >= 3
    assert all(lines[i + 1] == "" for i, line in enumerate(lines) if line == WAITING)
    told = [line for line in lines if line not in (WAITING, "")]
    whole = await client.post(path, json={**ENDPOINTS[path], "stream": True})
    undisturbed = [line for line in whole.text.splitlines() if line not in (WAITING, "")]
    assert list(map(without_ids, told)) == list(map(without_ids, undisturbed))


@every_endpoint
async def test_a_stream_that_is_never_silent_has_none(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={**ENDPOINTS[path], "stream": True})
    assert WAITING not in response.text


@pytest.mark.usefixtures("_impatient")
async def test_the_prompt_may_take_long(client: httpx.AsyncClient, engine: Any, pause: trio.Event) -> None:
    engine.script = [pause, Delta("Hello", 1, "stop")]
    lines = await read(client, "/v1/completions", pause)
    assert lines[:6] == [WAITING, ""] * 3
    assert lines[-2:] == ["data: [DONE]", ""]


@pytest.mark.usefixtures("_impatient")
@every_endpoint
async def test_comments_say_why_an_answer_does_not_go_on(
    client: httpx.AsyncClient, engine: Any, pause: trio.Event, path: str
) -> None:
    engine.waits_for = "node 'b' was lost:\nit left"
    async with client.stream("POST", path, json={**ENDPOINTS[path], "stream": True}) as response:
        lines = response.aiter_lines()
        while not (line := await anext(lines)).startswith(WAITING):
            pass
        assert line == ": waiting: node 'b' was lost: it left"
        pause.set()
        assert [line async for line in lines if line][-1].startswith("data: ")


@pytest.mark.usefixtures("_impatient")
async def test_before_it_is_admitted_nothing_is_sent(
    client: httpx.AsyncClient, engine: Any, nursery: trio.Nursery
) -> None:
    engine.gate = trio.Event()
    engine.script = [Overloaded("64 sessions run")]
    answers: list[httpx.Response] = []

    async def ask() -> None:
        async with client.stream("POST", "/v1/completions", json={**ENDPOINTS["/v1/completions"], "stream": True}) as r:
            answers.append(r)
            await r.aread()

    nursery.start_soon(ask)
    await engine.until(lambda e: e.sessions == 1)
    for _ in range(20):
        await client.get("/health")
    assert answers == []
    engine.gate.set()
    await engine.until(lambda e: e.sessions == 0)


@pytest.mark.usefixtures("_impatient")
async def test_a_whole_answer_has_none(client: httpx.AsyncClient, pause: trio.Event) -> None:
    texts: list[str] = []

    async def ask() -> None:
        texts.append((await client.post("/v1/completions", json=ENDPOINTS["/v1/completions"])).text)

    async with trio.open_nursery() as asking:
        asking.start_soon(ask)
        for _ in range(20):
            await client.get("/health")
        pause.set()
    assert texts[0].startswith("{")


@pytest.mark.usefixtures("_impatient")
async def test_what_breaks_a_silent_stream_is_its_last_event(
    client: httpx.AsyncClient, engine: Any, pause: trio.Event
) -> None:
    engine.script[-1] = RouteError("the route broke", node="n7")
    lines = await read(client, "/v1/completions", pause)
    assert "route_lost" in lines[-2]


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("comments", [1, 4])
async def test_a_client_that_goes_ends_the_generation(
    client: httpx.AsyncClient, engine: Any, pause: trio.Event, comments: int
) -> None:
    async with client.stream(
        "POST", "/v1/completions", json={**ENDPOINTS["/v1/completions"], "stream": True}
    ) as response:
        lines = response.aiter_lines()
        while comments:
            comments -= await anext(lines) == WAITING
    with trio.fail_after(300):
        await engine.until(lambda e: e.sessions == 0)
    assert not pause.is_set()


@pytest.mark.usefixtures("_impatient")
async def test_events_of_the_cluster_are_kept_alive(
    client: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def watch() -> AsyncIterator[Any]:
        async def silent() -> AsyncIterator[Any]:
            await trio.sleep_forever()
            yield

        yield silent()

    monkeypatch.setattr(engine, "watch", watch)
    async with client.stream("GET", "/v1/cluster/events") as response:
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [WAITING, "", WAITING, ""]


async def test_the_official_client_passes_over_them(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent_everywhere(items: AsyncIterator[bytes], seconds: float) -> AsyncIterator[bytes | None]:
        async for item in items:
            yield None
            yield item
        yield None

    url = f"http://{address[0]}:{address[1]}/v1"
    messages: Any = [{"role": "user", "content": "hi"}]

    def ask() -> list[str]:
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
            chat, text, response = "", "", ""
            for chunk in client.chat.completions.create(model="org/tiny", messages=messages, stream=True):
                chat += chunk.choices[0].delta.content or ""
            for completion in client.completions.create(model="org/tiny", prompt="hi", stream=True):
                text += completion.choices[0].text
            for event in client.responses.create(model="org/tiny", input="hi", stream=True):
                response += event.delta if event.type == "response.output_text.delta" else ""
            return [chat, text, response]

    monkeypatch.setattr(answer, "with_silences", silent_everywhere)
    with trio.fail_after(300):
        assert await trio.to_thread.run_sync(ask) == ["Hello world"] * 3


def test_the_next_item_is_waited_for_behind_the_silences() -> None:
    async def main() -> list[int | None]:
        silent = asyncio.Event()

        async def items() -> AsyncIterator[int]:
            yield 1
            await silent.wait()
            yield 2

        told: list[int | None] = []
        async for item in with_silences(items(), 0.001):
            told.append(item)
            if told.count(None) == 2:
                silent.set()
        return told

    told = asyncio.run(main())
    assert [item for item in told if item is not None] == [1, 2]
    assert told[:4] == [1, None, None, told[3]]


def test_leaving_ends_what_is_waited_for() -> None:
    ended = []

    async def main() -> None:
        async def items() -> AsyncIterator[int]:
            try:
                await asyncio.sleep(3600)
                yield 1
            finally:
                ended.append(True)

        async with closing(with_silences(items(), 0.001)) as told:
            assert await anext(told) is None
        assert ended == [True]

    asyncio.run(main())
