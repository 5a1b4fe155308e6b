"""Log probabilities in the shapes of both endpoints, whole and streamed, and prompts that are given back."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from core.interfaces.engine import Delta, TokenLogprob

CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "org/tiny", "prompt": "a é"}


def token(raw: bytes, logprob: float | None, *top: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(raw[0], raw.decode(errors="replace"), raw, logprob, top)


YES, NO = token(b"yes", -0.1), token(b"no", -2.5)
FIRST, SECOND = token("é".encode()[:1], -0.5), token("é".encode()[1:], -0.25)
PROMPT = (
    token(b"<s>", None),
    token(b"a", -1.0, token(b"b", -0.5)),
    token(b" ", -math.inf),
    FIRST,
    SECOND,
)


@pytest.fixture(autouse=True)
def _scripted(engine: Any) -> None:
    engine.script = [
        Delta("yes", 1, None, (token(b"yes", -0.1, YES, NO),)),
        Delta("", 2, None, (FIRST,)),
        Delta("é!", 4, None, (SECOND, token(b"!", -0.75))),
        Delta("", 4, "length"),
    ]
    engine.prompt_logprobs = PROMPT


def chunks(text: str) -> list[dict[str, Any]]:
    return [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in text.split("\n\n")[:-2]]


async def test_chat_tells_each_token_with_its_bytes_and_alternatives(client: httpx.AsyncClient) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    (choice,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    first, half, *_ = choice["logprobs"]["content"]
    assert first == {
        "token": "yes",
        "bytes": [121, 101, 115],
        "logprob": -0.1,
        "top_logprobs": [
            {"token": "yes", "bytes": [121, 101, 115], "logprob": -0.1},
            {"token": "no", "bytes": [110, 111], "logprob": -2.5},
        ],
    }
    assert (half["token"], half["bytes"]) == ("\ufffd", [0xC3])
    assert len(choice["logprobs"]["content"]) == 4
    assert choice["logprobs"]["refusal"] is None


async def test_a_chat_stream_tells_every_token_once(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "stream": True})
    opening, *rest, end = chunks(response.text)
    assert opening["logprobs"] is None
    assert [chunk["delta"] for chunk in rest] == [{"content": "yes"}, {"content": ""}, {"content": "é!"}]
    assert [[each["logprob"] for each in chunk["logprobs"]["content"]] for chunk in rest] == [
        [-0.1],
        [-0.5],
        [-0.25, -0.75],
    ]
    assert (end["delta"], end["logprobs"], end["finish_reason"]) == ({}, None, "length")


async def test_nothing_is_told_that_was_not_asked_for(client: httpx.AsyncClient, engine: Any) -> None:
    engine.script = [Delta("yes", 1, "stop")]
    assert (await client.post("/v1/completions", json=COMPLETION)).json()["choices"][0]["logprobs"] is None
    assert (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]["logprobs"] is None


async def test_a_completion_lists_tokens_with_their_place_in_the_text(client: httpx.AsyncClient) -> None:
    (choice,) = (await client.post("/v1/completions", json={**COMPLETION, "logprobs": 1})).json()["choices"]
    assert choice["text"] == "yesé!"
    assert choice["logprobs"] == {
        "tokens": ["yes", "bytes:\\xc3", "bytes:\\xa9", "!"],
        "token_logprobs": [-0.1, -0.5, -0.25, -0.75],
        "top_logprobs": [{"yes": -0.1, "no": -2.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.25}, {"!": -0.75}],
        "text_offset": [0, 3, 3, 4],
    }


async def test_without_alternatives_none_are_listed(client: httpx.AsyncClient) -> None:
    (choice,) = (await client.post("/v1/completions", json={**COMPLETION, "logprobs": 0})).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] is None


async def test_an_echoed_prompt_comes_first_with_its_tokens(client: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "logprobs": 1, "echo": True}
    (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == "a éyesé!"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["<s>", "a", " "]
    assert logprobs["token_logprobs"][:4] == [None, -1.0, -9999.0, -0.5]
    assert logprobs["top_logprobs"][:3] == [None, {"b": -0.5, "a": -1.0}, {" ": -9999.0}]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 2, 3, 6, 6, 7]


async def test_an_echo_streams_as_it_is_told_whole(client: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "logprobs": 1, "echo": True, "n": 2}
    whole = (await client.post("/v1/completions", json=body)).json()["choices"]
    streamed = chunks((await client.post("/v1/completions", json={**body, "stream": True})).text)
    for index in (0, 1):
        own = [chunk for chunk in streamed if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in own) == whole[index]["text"]
        for name, values in whole[index]["logprobs"].items():
            assert [v for chunk in own if chunk["logprobs"] for v in chunk["logprobs"][name]] == values


async def test_a_prompt_of_token_ids_is_echoed_as_its_text(client: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "prompt": [[104, 105], [111]], "echo": True, "max_tokens": 0}
    choices = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["hiyesé!", "oyesé!"]


async def test_a_prompt_with_unknown_tokens_cannot_be_echoed(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, "prompt": [1000], "echo": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def test_a_harness_that_scores_prompts_is_served(client: httpx.AsyncClient, engine: Any) -> None:
    """As lm-eval's local-completions asks: token ids, echo, one token, its alternatives by name."""
    engine.script = [Delta("y", 1, "length", (token(b"y", -0.1, token(b"y", -0.1)),))]
    body = {
        "model": "org/tiny",
        "prompt": [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    for choice in (await client.post("/v1/completions", json=body)).json()["choices"]:
        scored = choice["logprobs"]["token_logprobs"][2:-1]
        tops = choice["logprobs"]["top_logprobs"][2:-1]
        assert sum(scored) == pytest.approx(-9999.75)
        assert [score == max(top.values()) for score, top in zip(scored, tops, strict=True)] == [True, True, True]
