"""Responses that are kept: what refers to them, who may, and when they are forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio
from openai import NotFoundError, OpenAI

from core.errors import RequestError
from core.gateway.memory import ResponseMemory
from core.gateway.schemas.items import ItemReference, MessageItem, OutputTextPart
from core.gateway.schemas.response_objects import OutputMessage, OutputText, ResponseObject
from core.gateway.schemas.responses import ReasoningConfig, TextConfig
from core.gateway.server import serve_http
from core.gateway.settings import ApiSettings
from core.interfaces.engine import Delta

ME, YOU = "key 1", "key 2"
HERMES = "{% if tools %}<tool_call>{% endif %}{{ messages }}"
WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": {}, "strict": False}
CALL = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'


def response(number: int, text: str = "x") -> ResponseObject:
    said = OutputMessage(id=f"msg_{number}", status="completed", content=[OutputText(text)])
    return ResponseObject(
        id=f"resp_{number}",
        created_at=0,
        model="m",
        output=[said],
        instructions=None,
        max_output_tokens=None,
        metadata={},
        parallel_tool_calls=True,
        reasoning=ReasoningConfig(),
        temperature=None,
        text=TextConfig(),
        tool_choice="auto",
        tools=[],
        top_p=None,
        user=None,
        previous_response_id=None,
        store=True,
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def forgotten(memory: ResponseMemory, number: int, client: str = ME) -> bool:
    try:
        memory.get(client, f"resp_{number}")
        memory.resolve(client, None, [ItemReference(f"msg_{number}")])
    except RequestError as error:
        with pytest.raises(RequestError):
            memory.resolve(client, None, [ItemReference(f"msg_{number}")])
        assert error.code == "response_not_found"
        return True
    return False


def test_the_oldest_is_forgotten_when_there_are_too_many() -> None:
    memory = ResponseMemory(60, most=2)
    for number in range(3):
        memory.keep(ME, [], response(number))
    assert [forgotten(memory, number) for number in range(3)] == [True, False, False]


def test_the_oldest_is_forgotten_when_there_are_too_many_bytes() -> None:
    memory = ResponseMemory(60, most_bytes=4000)
    memory.keep(ME, [], response(0, "x" * 5000))
    memory.keep(ME, [], response(1, "x" * 900))
    memory.keep(ME, [], response(2, "x" * 900))
    assert [forgotten(memory, number) for number in range(3)] == [True, True, False]
    memory.delete(ME, "resp_2")
    memory.keep(ME, [], response(3, "x" * 900))
    assert not forgotten(memory, 3)


def test_who_asks_for_much_is_forgotten_before_others() -> None:
    memory = ResponseMemory(60, most_bytes=8000)
    memory.keep(YOU, [], response(0))
    for number in range(1, 5):
        memory.keep(ME, [], response(number, "x" * 900))
    assert not forgotten(memory, 0, YOU)
    assert [forgotten(memory, number) for number in (1, 4)] == [True, False]


def test_time_forgets() -> None:
    clock = Clock()
    memory = ResponseMemory(60, clock=clock)
    memory.keep(ME, [], response(1))
    clock.now = 59
    memory.keep(ME, [], response(2))
    assert not forgotten(memory, 1)
    clock.now = 61
    assert [forgotten(memory, number) for number in (1, 2)] == [True, False]


def test_an_item_is_there_as_long_as_any_response_that_has_it() -> None:
    memory = ResponseMemory(60)
    first = MessageItem("user", "hi", id="msg_0")
    memory.keep(ME, [first], response(1))
    memory.keep(ME, memory.resolve(ME, "resp_1", [MessageItem("user", "more")]), response(2))
    said = MessageItem("assistant", [OutputTextPart("x", logprobs=[])], id="msg_1", status="completed")
    assert memory.resolve(ME, "resp_2", [])[:2] == [first, said]
    memory.delete(ME, "resp_2")
    assert memory.resolve(ME, None, [ItemReference("msg_1"), ItemReference("msg_0")]) == [said, first]
    memory.delete(ME, "resp_1")
    with pytest.raises(RequestError) as caught:
        memory.resolve(ME, None, [first, ItemReference("msg_0")])
    assert (caught.value.param, caught.value.code) == ("input[1].id", "item_not_found")


def test_nobody_is_told_what_another_one_was() -> None:
    memory = ResponseMemory(60)
    memory.keep(ME, [], response(1))
    assert forgotten(memory, 1, YOU)
    with pytest.raises(RequestError):
        memory.delete(YOU, "resp_1")
    assert not forgotten(memory, 1)


async def with_client(address: tuple[str, int], talk: Callable[[OpenAI], Any], key: str = "-") -> Any:
    def run() -> Any:
        with OpenAI(base_url=f"http://{address[0]}:{address[1]}/v1", api_key=key, max_retries=0) as client:
            return talk(client)

    with trio.fail_after(300):
        return await trio.to_thread.run_sync(run)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_from_a_kept_response(address: tuple[str, int], engine: Any, stream: bool) -> None:
    engine.chat_template, engine.script = HERMES, [Delta(CALL, 1, "stop")]

    def create(client: OpenAI, **fields: Any) -> Any:
        ask: dict[str, Any] = {"model": "org/tiny", "tools": [WEATHER], **fields}
        if not stream:
            return client.responses.create(**ask)
        return list(client.responses.create(**ask, stream=True))[-1].response

    def talk(client: OpenAI) -> Any:
        first = create(client, input="hi", instructions="Be brief.")
        (call,) = first.output
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "22 C"}
        second = create(client, input=[result], previous_response_id=first.id)
        reference = {"type": "item_reference", "id": call.id}
        create(client, input=[{"role": "user", "content": "hi"}, reference, result], store=False)
        return first, second, client.responses.retrieve(second.id)

    first, second, retrieved = await with_client(address, talk)
    assert (first.store, first.previous_response_id, second.previous_response_id) == (True, None, first.id)
    assert retrieved == second
    opened, by_response, by_item = (request.prompt.messages for request in engine.requests)
    assert opened[0] == {"role": "system", "content": "Be brief."}
    assert by_response == by_item
    assert [message["role"] for message in by_response] == ["user", "assistant", "tool"]
    assert by_response[1]["tool_calls"][0]["function"]["name"] == by_response[2]["name"] == "get_weather"


async def test_a_response_is_deleted(address: tuple[str, int]) -> None:
    def talk(client: OpenAI) -> Any:
        kept = client.responses.create(model="org/tiny", input="hi", store=True)
        unkept = client.responses.create(model="org/tiny", input="hi", store=False)
        client.responses.delete(kept.id)
        for gone in (kept, unkept):
            with pytest.raises(NotFoundError, match="forgotten or deleted"):
                client.responses.retrieve(gone.id)
        with pytest.raises(NotFoundError) as caught:
            client.responses.create(model="org/tiny", input="hi", previous_response_id=kept.id)
        return kept.store, unkept.store, caught.value.param, caught.value.code

    assert await with_client(address, talk) == (True, False, "previous_response_id", "response_not_found")


async def test_another_keys_response_is_not_there(engine: Any, nursery: trio.Nursery) -> None:
    settings = ApiSettings(keys=frozenset({"mine", "yours"}))
    address = await nursery.start(serve_http, engine, "127.0.0.1", 0, settings)
    kept = await with_client(address, lambda client: client.responses.create(model="org/tiny", input="hi"), "mine")

    def talk(client: OpenAI) -> None:
        with pytest.raises(NotFoundError):
            client.responses.retrieve(kept.id)

    await with_client(address, talk, "yours")
    assert (await with_client(address, lambda client: client.responses.retrieve(kept.id), "mine")) == kept


async def test_a_server_that_keeps_nothing_says_so(engine: Any, nursery: trio.Nursery) -> None:
    host, port = await nursery.start(serve_http, engine, "127.0.0.1", 0, ApiSettings(keep_responses=0))
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
        body = {"model": "org/tiny", "input": "hi"}
        plain = await client.post("/v1/responses", json=body)
        assert (plain.status_code, plain.json()["store"]) == (200, False)
        stored = await client.post("/v1/responses", json={**body, "store": True})
        assert (stored.status_code, stored.json()["error"]["param"]) == (400, "store")
        gone = await client.get(f"/v1/responses/{plain.json()['id']}")
        assert gone.status_code == 404
        assert "--keep-responses" in gone.json()["error"]["message"]


async def test_the_tokens_of_an_input_are_counted(client: httpx.AsyncClient, engine: Any) -> None:
    engine.chat_template = HERMES
    kept = (await client.post("/v1/responses", json={"model": "org/tiny", "input": "1234"})).json()
    body = {"model": "org/tiny", "input": "56", "previous_response_id": kept["id"], "tools": [WEATHER]}
    counted = await client.post("/v1/responses/input_tokens", json=body)
    text = "1234" + "Hello world" + "56"
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": len(text)}
    assert len(engine.requests) == 1


async def test_a_kept_response_is_told_as_a_whole(client: httpx.AsyncClient) -> None:
    kept = (await client.post("/v1/responses", json={"model": "org/tiny", "input": "hi"})).json()
    assert (await client.get(f"/v1/responses/{kept['id']}", params={"stream": "false"})).json() == kept
    refused = await client.get(f"/v1/responses/{kept['id']}", params={"stream": "true"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
