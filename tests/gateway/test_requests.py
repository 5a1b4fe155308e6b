"""What a request's fields become, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from core.errors import RequestError
from core.gateway.schemas.chat import ChatBody
from core.gateway.schemas.common import Body
from core.gateway.schemas.completions import CompletionBody
from core.gateway.schemas.decoding import decode
from core.interfaces.engine import Conversation, GenerationRequest

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> GenerationRequest:
    return _request(ChatBody, {"model": "m", "messages": [USER], **fields})


def completion(**fields: Any) -> GenerationRequest:
    return _request(CompletionBody, {"model": "m", "prompt": "hi", **fields})


def _request(kind: type[Body], fields: dict[str, Any]) -> GenerationRequest:
    (request,) = requests(kind, fields)
    return request


def requests(kind: type[Body], fields: dict[str, Any]) -> tuple[GenerationRequest, ...]:
    return decode(json.dumps(fields).encode(), kind).generations()


def test_every_supported_field_arrives() -> None:
    given = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -1,
        "max_tokens": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100, "8": 1.5},
    }
    expected: dict[str, Any] = {**given, "stop": ("a", "b"), "stop_token_ids": (3,), "logit_bias": {7: -100, 8: 1.5}}
    assert completion(**given) == GenerationRequest("hi", **expected)
    assert chat(**given) == GenerationRequest(Conversation((USER,)), **expected)


def test_top_k_of_minus_one_takes_all() -> None:
    assert completion(top_k=-1).top_k == 0


def test_log_probabilities_are_asked_for_in_each_endpoints_way() -> None:
    assert (chat().logprobs, chat(logprobs=True).logprobs, chat(logprobs=True, top_logprobs=3).logprobs) == (None, 0, 3)
    assert chat(logprobs=True, top_logprobs=3).prompt_logprobs is None
    assert (completion(logprobs=2).logprobs, completion(logprobs=2).prompt_logprobs) == (2, None)
    assert (completion(logprobs=0, echo=True).prompt_logprobs, completion(echo=True).prompt_logprobs) == (0, None)


def test_what_is_left_out_or_null_is_left_to_the_model() -> None:
    names = ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop", "stream", "stream_options", "user")
    assert chat() == chat(**dict.fromkeys(names)) == GenerationRequest(Conversation((USER,)))
    assert completion() == completion(**dict.fromkeys(names)) == GenerationRequest("hi", max_tokens=16)


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat(max_completion_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).max_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2]], [(1, 2)]),
        ([7], [(7,)]),
        ("", [""]),
        (["a", ""], ["a", ""]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_prompts_in_each_of_their_forms(prompt: Any, expected: Any) -> None:
    assert [request.prompt for request in requests(CompletionBody, {"model": "m", "prompt": prompt})] == expected


def test_every_prompt_has_its_choices_in_order() -> None:
    made = requests(CompletionBody, {"model": "m", "prompt": ["a", "b"], "n": 2, "seed": 5, "best_of": 2})
    assert [(request.prompt, request.seed) for request in made] == [("a", 5), ("a", 6), ("b", 5), ("b", 6)]


def test_a_request_says_whom_it_is_from() -> None:
    body = decode(json.dumps({"model": "m", "prompt": "a"}).encode(), CompletionBody)
    assert body.generations("somebody")[0].client == "somebody"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "system", "content": parts}, USER]).prompt == Conversation(
        ({"role": "system", "content": "a b"}, USER)
    )


def test_messages_of_every_role_arrive() -> None:
    told = [
        {"role": "developer", "content": "x", "name": "d"},
        {"role": "user", "content": [], "name": "u"},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "assistant"},
    ]
    assert chat(messages=told).prompt == Conversation(
        (
            {"role": "developer", "content": "x", "name": "d"},
            {"role": "user", "content": "", "name": "u"},
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": ""},
        )
    )


def test_a_single_stop_string() -> None:
    assert chat(stop="x").stop == ("x",)


def test_an_answer_may_be_handed_back_as_clients_have_parsed_it() -> None:
    call = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}
    cached = {"cache_control": {"type": "ephemeral"}}
    said = {
        "role": "assistant",
        "id": "msg_1",
        "content": None,
        "refusal": "No.",
        "parsed": {"a": [1]},
        "annotations": [{"type": "url_citation"}],
        "audio": None,
        "function_call": None,
        "tool_calls": [{"id": "c", "type": "function", "function": call, "index": 0}],
    }
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}], "refusal": None}
    user = {**USER, **cached, "content": [{"type": "text", "text": "hi", **cached}]}
    tool = {"type": "function", "function": {"name": "f"}, **cached}
    told = chat(messages=[user, said, refused], tools=[tool]).prompt
    assert isinstance(told, Conversation)
    assert [message["content"] for message in told.messages] == ["hi", "No.", "Never."]
    assert told.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_what_other_servers_add_to_an_answer_may_be_handed_back() -> None:
    said = {
        "role": "assistant",
        "content": "Paris.",
        "reasoning": "France, then.",
        "reasoning_details": [{"type": "reasoning.text", "text": "France, then."}],
        "thinking_blocks": None,
        "provider_specific_fields": {"refusal": None},
    }
    told = chat(messages=[USER, said, USER]).prompt
    assert isinstance(told, Conversation)
    assert told.messages[1] == {"role": "assistant", "content": "Paris.", "reasoning_content": "France, then."}


def test_a_part_that_is_no_text_is_refused_as_such() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(RequestError, match="only text is read here") as caught:
        chat(messages=[{"role": "user", "content": parts}])
    assert caught.value.param == "messages[0].content[0].type"


def test_an_answer_may_go_on_with_the_last_message() -> None:
    told = chat(continue_final_message=True, add_generation_prompt=False).prompt
    assert isinstance(told, Conversation)
    assert (told.opens_answer, told.continues_last) == (False, True)


IDLE_CHAT = {
    "n": 1,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "store": False,
    "service_tier": "auto",
    "verbosity": "medium",
    "prompt_cache_retention": "in-memory",
    "modalities": ["text"],
    "functions": [],
    "function_call": "auto",
    "user": "me",
    "audio": None,
    "stream_options": None,
    "metadata": {"a": "b"},
    "safety_identifier": "x",
    "prompt_cache_key": "y",
}


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    assert chat(**IDLE_CHAT) == chat()
    assert completion(best_of=1, echo=False, suffix=None, logprobs=None, n=1) == completion()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"verbosity": "low"}, "verbosity"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_known_fields_that_ask_for_something_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match="not supported") as caught:
        chat(**fields)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": [USER]}, "messages"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"model": None}, "model"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"n": 16, "prompt": ["a"] * 9}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": "a" * (4 * 2**20 + 1)}, "prompt"),
        ({"user": 1}, "user"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 4097}, "stop"),
        ({"prompt": [[7] * 10_000] * 64, "echo": True, "logprobs": 5}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ],
)
def test_a_completion_field_that_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert param.partition("[")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [USER, 3]}, "messages[1]"),
        ({"messages": [USER, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
        ({"messages": [USER] * 4097}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * (2 * 2**20)}] * 3}, "messages"),
        ({"messages": [{**USER, "name": 1}]}, "messages[0].name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{**USER, "extra": 1}]}, "messages[0].extra"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_a_chat_field_that_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf{}",
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b"\xff",
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 5_000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode(body, ChatBody)
    assert caught.value.code == "invalid_json"


def test_a_byte_order_mark_is_named() -> None:
    with pytest.raises(RequestError, match="byte order mark"):
        decode(b"\xef\xbb\xbf{}", ChatBody)


async def test_a_refused_field_is_a_400_that_names_it(client: httpx.AsyncClient, engine: Any) -> None:
    body = {"model": "org/tiny", "messages": [USER], "store": True}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json() == {
        "error": {
            "message": "'store' is not supported (leave it out, or send null or false)",
            "type": "invalid_request_error",
            "param": "store",
            "code": "unsupported_parameter",
        }
    }
    assert engine.requests == []
