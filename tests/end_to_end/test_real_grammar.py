"""A real model's tokenizer, SmolLM2-135M-Instruct's from a GGUF file, in a grammar: noise for logits, JSON for text."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from core import Source
from core.cli.demo_model import demo_model
from core.interfaces.engine import Grammar
from core.plugins import PluginHost
from core.runtime.grammar import Grammars
from core.runtime.sampling import Sampler, choose
from core.runtime.sampling_params import SamplingParams
from core.runtime.tokenizer import Tokenizer

VOCAB = 49_152
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "days": {"type": "array", "items": {"enum": ["mon", "tue", "wed"]}, "minItems": 1, "maxItems": 3},
        "limit": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 0, "maximum": 99}]},
    },
    "required": ["city", "days", "limit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    checkpoint = PluginHost.installed().open_checkpoint(Source(str(demo_model())))
    yield Tokenizer(checkpoint.tokenizer())
    checkpoint.close()


def generate(tokenizer: Tokenizer, grammar: Grammar, seed: int, forced: str = "") -> str:
    sampler = Sampler(SamplingParams(seed=seed), constraint=Grammars(tokenizer).matcher(grammar))
    prefix, tokens = tokenizer.encode(forced), []
    generator = torch.Generator().manual_seed(seed)
    for position in range(200):
        logits = torch.randn(1, VOCAB, generator=generator)
        [token] = prefix[position : position + 1] or choose(logits, [sampler], [position])
        sampler.accept(token)
        if token in tokenizer.eos_ids:
            return tokenizer.decode(tokens)
        tokens.append(token)
    raise AssertionError(f"no end to {tokenizer.decode(tokens)!r}")


def require_weather(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["city", "days", "limit"]
    assert 1 <= len(value["city"]) <= 12
    assert 1 <= len(value["days"]) <= 3
    assert set(value["days"]) <= {"mon", "tue", "wed"}
    assert value["limit"] is None or 0 <= value["limit"] <= 99


def test_the_bytes_of_tokens_are_those_of_their_text(tokenizer: Tokenizer) -> None:
    text = 'Ünïcode 日本語 👩‍👩‍👧‍👦 {"a":\t[1, 2]}\r\n'
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    for token in range(tokenizer.vocab_size):
        assert tokenizer.token_bytes(token).decode(errors="replace") == tokenizer.decode_whole([token])


def test_noise_makes_json_that_fits_the_schema(tokenizer: Tokenizer) -> None:
    for seed in range(4):
        require_weather(generate(tokenizer, Grammar("json_schema", json.dumps(WEATHER)), seed))


def test_noise_makes_a_call_from_the_trigger_on(tokenizer: Tokenizer) -> None:
    for seed in range(4):
        grammar = Grammar("json_schema", json.dumps(WEATHER), trigger="<tool_call>")
        before, _, call = generate(tokenizer, grammar, seed, forced="Let me see. <tool_call>").partition("<tool_call>")
        assert before == "Let me see. "
        require_weather(call)
