"""Options that other servers have and people's programs send: those that are ours by another name, and the others.

llama.cpp's server, Ollama, vLLM and text-generation-inference have them beside, or instead of, OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from core.errors import RequestError
from core.gateway.schemas.decoding import Idle

_SAME = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
UNBOUNDED = -1
"""As a number of tokens to predict: as many as there is room for. So is -2 to llama.cpp."""

IDLE: Idle = {
    "bad_words": ([],),
    "cache_prompt": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "id_slot": (-1,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "penalty_last_n": (-1,),
    "priority": (0,),
    "repeat_last_n": (-1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "tfs_z": (1,),
    "timings_per_token": (False,),
    "top_a": (0,),
    "truncate_prompt_tokens": (),
    "typ_p": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
"""Values that ask for what is done anyway."""

_CONTEXT = "the context is as long as model, memory and the server's option --max-context allow"
_DRAW = "shape the draw with 'temperature', 'top_p', 'top_k' or 'min_p'"
_REPEATS = "use 'repetition_penalty', 'frequency_penalty' or 'presence_penalty', which look at the whole text"
_FORMAT = "use 'response_format' with a JSON schema"
_CACHE = "prompts that begin alike start from caches by themselves"
_HOST = "the host's options of core serve and core node decide it"
_THINKING = "use 'chat_template_kwargs' or 'reasoning_effort'"
_BEAMS = "ask for several choices with 'n', or for the likeliest tokens with 'temperature' 0"
_MARKUP = "special tokens and stop strings are never part of an answer"

INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("num_ctx", "n_ctx", "max_model_len"), _CONTEXT),
    **dict.fromkeys(("mirostat", "mirostat_tau", "mirostat_eta", "samplers", "tfs_z", "top_a", "typ_p"), _DRAW),
    **dict.fromkeys(("typical_p", "dynatemp_range", "dynatemp_exponent", "xtc_probability", "xtc_threshold"), _DRAW),
    **dict.fromkeys(("repeat_last_n", "penalty_last_n", "penalize_nl", "dry_multiplier", "dry_base"), _REPEATS),
    **dict.fromkeys(("grammar", "guided_regex", "guided_choice", "guided_grammar"), _FORMAT),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), _FORMAT),
    **dict.fromkeys(("cache_prompt", "id_slot", "n_keep", "num_keep", "cache_salt"), _CACHE),
    **dict.fromkeys(("num_gpu", "num_thread", "num_batch", "use_mmap", "use_mlock", "keep_alive"), _HOST),
    **dict.fromkeys(("think", "thinking", "enable_thinking", "thinking_budget"), _THINKING),
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), _BEAMS),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"), _MARKUP),
    "bad_words": "use 'logit_bias'",
    "chat_template": "give it to the server: core serve --chat-template FILE",
    "do_sample": "use 'temperature' 0 for the likeliest tokens",
    "documents": "put them into a message",
    "max_output_tokens": "use 'max_tokens'",
    "min_tokens": "use 'ignore_eos' with 'max_tokens'",
    "n_probs": "use 'logprobs' and 'top_logprobs'",
    "options": "write each of them as a field of the request",
    "t_max_predict_ms": "use 'max_time', in seconds",
    "truncate_prompt_tokens": "shorten the prompt; /tokenize counts its tokens",
}
"""What of ours to use, by the fields of others."""


def ours(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields by our names. Raises RequestError where one and the same is said twice, and differs."""
    renamed = dict(fields)
    for name in _SAME.keys() & fields.keys():
        value, same = renamed.pop(name), _SAME[name]
        if value is not None:
            _set(renamed, same, UNBOUNDED if same == "max_tokens" and value == -2 else value, name)
    return renamed


def without_unbounded(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """The fields without those of `names` that bound nothing."""
    return {name: value for name, value in fields.items() if name not in names or value != UNBOUNDED}


def with_format(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with `response_format` for what other servers call `guided_json`, `structured_outputs` or so.

    Raises RequestError as `ours` does, and for a structure of the output that isn't JSON.
    """
    renamed = dict(fields)
    for name in ("format", "guided_json", "json_schema", "structured_outputs"):
        value = renamed.pop(name, None)
        if value is not None:
            _set(renamed, "response_format", _format(name, value), name)
    return renamed


def _format(name: str, value: Any) -> dict[str, Any]:
    match name, value:
        case "structured_outputs", {"json": schema, **others} if not any(others.values()):
            return _format("json", schema)
        case ("structured_outputs", {"json_object": True}) | ("format", "json"):
            return {"type": "json_object"}
        case "structured_outputs", _:
            raise RequestError(f"'{name}' is supported for 'json' and 'json_object' alone", hint=_FORMAT, param=name)
        case _, str():
            return _format(name, _decoded(name, value))
        case _, dict():
            return {"type": "json_schema", "json_schema": {"name": name, "schema": value}}
    raise RequestError(f"'{name}' must be a JSON schema", hint=_FORMAT, param=name)


def _decoded(name: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise RequestError(f"'{name}' is no JSON schema", str(error), _FORMAT, param=name) from error


def _set(fields: dict[str, Any], name: str, value: Any, as_: str) -> None:
    if fields.get(name) not in (None, value):
        raise RequestError(f"{as_!r} and {name!r} say different things", hint=f"send {name!r} alone", param=as_)
    fields[name] = value
