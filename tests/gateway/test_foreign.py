"""Options of other servers: ours by another name, or refused by the name that ours have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.errors import RequestError
from core.gateway.schemas.chat import ChatBody
from core.gateway.schemas.common import Body
from core.gateway.schemas.completions import CompletionBody
from core.gateway.schemas.decoding import decode
from core.gateway.schemas.foreign import IDLE, INSTEAD
from core.gateway.schemas.responses import ResponseBody
from core.interfaces.engine import GenerationRequest

USER = {"role": "user", "content": "hi"}


def asked(kind: type[Body], fields: dict[str, Any]) -> GenerationRequest:
    (request,) = decode(json.dumps({"model": "m", **fields}).encode(), kind).generations()
    return request


def chat(**fields: Any) -> GenerationRequest:
    return asked(ChatBody, {"messages": [USER], **fields})


def completion(**fields: Any) -> GenerationRequest:
    return asked(CompletionBody, {"prompt": "hi", **fields})


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"n_predict": 7}, {"max_tokens": 7}),
        ({"num_predict": -1, "max_new_tokens": None}, {"max_tokens": -1}),
        ({"n_predict": -2}, {"max_tokens": -1}),
        ({"max_new_tokens": 7, "max_tokens": 7}, {"max_tokens": 7}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"mirostat": 0, "typical_p": 1.0, "cache_prompt": True, "min_tokens": 0, "truncate_prompt_tokens": None}, {}),
    ],
)
def test_options_of_other_servers_that_are_ours(fields: dict[str, Any], same: dict[str, Any]) -> None:
    assert chat(**fields) == chat(**same)
    assert completion(**fields) == completion(**same)


def test_no_bound_on_the_tokens_is_none() -> None:
    assert chat(max_tokens=-1) == chat()
    assert chat(max_completion_tokens=-1).max_tokens is None
    assert completion(max_tokens=-1).max_tokens is None
    assert completion().max_tokens == 16
    for wrong in (-3, -2):
        with pytest.raises(RequestError):
            completion(max_tokens=wrong)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"guided_json": {"const": 1}}, {"const": 1}),
        ({"guided_json": '{"const": 1}'}, {"const": 1}),
        ({"json_schema": {"const": 1}}, {"const": 1}),
        ({"format": {"const": 1}}, {"const": 1}),
        ({"structured_outputs": {"json": {"const": 1}, "regex": None}}, {"const": 1}),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, {"const": 1}),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"format": "json"}, {"type": "object"}),
    ],
)
def test_schemas_of_other_servers_are_those_of_the_answer(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    body = decode(json.dumps({"model": "m", "messages": [USER], **fields}).encode(), ChatBody)
    assert body.wishes().schema == wanted


@pytest.mark.parametrize(
    ("fields", "param", "ours"),
    [
        ({"num_ctx": 4096}, "num_ctx", "--max-context"),
        ({"mirostat": 2}, "mirostat", "min_p"),
        ({"mirostat_tau": 5.0}, "mirostat_tau", "min_p"),
        ({"min_tokens": 5}, "min_tokens", "ignore_eos"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "/tokenize"),
        ({"cache_prompt": False}, "cache_prompt", "by themselves"),
        ({"guided_regex": "a"}, "guided_regex", "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "response_format"),
        ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "structured_outputs", "response_format"),
        ({"guided_json": "{"}, "guided_json", "response_format"),
        ({"guided_json": [1]}, "guided_json", "response_format"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "response_format"),
        ({"chat_template": "x"}, "chat_template", "--chat-template"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty", "repetition_penalty"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
    ],
)
def test_options_of_other_servers_that_can_not_be_had_name_ours(fields: dict[str, Any], param: str, ours: str) -> None:
    with pytest.raises(RequestError, match=ours) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_whatever_is_idle_says_what_else_there_is_unless_leaving_it_out_is_all() -> None:
    assert IDLE.keys() - INSTEAD.keys() == {
        "include_reasoning",
        "priority",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "timings_per_token",
    }
    assert not INSTEAD.keys() & {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}


def test_a_response_has_names_of_its_own() -> None:
    with pytest.raises(RequestError, match="max_output_tokens") as caught:
        decode(json.dumps({"model": "m", "input": "hi", "max_tokens": 5}).encode(), ResponseBody)
    assert caught.value.param == "max_tokens"
