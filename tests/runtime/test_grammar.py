"""House rules: logits are seeded noise, so that a draw goes wherever the grammar lets it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from core.errors import RequestError, StageError
from core.interfaces.engine import Grammar
from core.runtime.grammar import Grammars
from core.runtime.sampling import Sampler, choose
from core.runtime.sampling_params import SamplingParams
from core.runtime.tokenizer import Tokenizer

EOS, CALL, MARK = "<eos>", "[CALL]", "<mark>"
CLOSERS = ('"', "}", "]", '"}', EOS)
PADDING = 7
ACROSS = ["<f", "f>", 'f>{"', 'f>x{"', 'f> {"', "f>\n", '{"', '":', '": ', "1, ", '"}', "],", "é", "tru", '"a', "}\n"]
"""Tokens that go over the borders of what grammars are made of."""
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -5, "maximum": 12}, "y": {"type": "boolean"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte-level":
        inner = FastTokenizer(models.BPE({}, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoded = [inner.pre_tokenizer.pre_tokenize_str(text)[0][0] for text in ACROSS]
        units = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *encoded])
        inner.model = models.BPE({unit: i for i, unit in enumerate(units)}, [])
        inner.decoder = decoders.ByteLevel()
    else:
        pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [text.replace(" ", "▁") for text in (" ", *ACROSS)]
        inner = FastTokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([AddedToken(name, special=True) for name in (EOS, CALL, MARK)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS))


TOKENIZERS = {kind: tokenizer_of(kind) for kind in ("byte-level", "sentencepiece")}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def noise(tokenizer: Tokenizer, seed: int, steps: int) -> Tensor:
    """Logits whose draws close what they have opened before long."""
    logits = torch.randn(steps, tokenizer.vocab_size + PADDING, generator=torch.Generator().manual_seed(seed))
    closers = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).decode(errors="replace") in CLOSERS]
    logits[:, closers] += 4
    return logits


def generate(tokenizer: Tokenizer, grammar: Grammar, seed: int, forced: str = "") -> str:
    """Text that noise writes at temperature 1; `forced` comes first."""
    sampler = Sampler(SamplingParams(seed=seed), constraint=Grammars(tokenizer).matcher(grammar))
    tokens: list[int] = []
    for position, logits in enumerate(noise(tokenizer, seed, steps=400)):
        room = tokenizer.encode(forced, special_tokens=False)[position : position + 1]
        [token] = room or choose(logits[None], [sampler], [position])
        sampler.accept(token)
        if token in tokenizer.eos_ids:
            return tokenizer.decode_whole(tokens)
        tokens.append(token)
    raise AssertionError(f"no end to {tokenizer.decode_whole(tokens)!r}")


def is_point(value: Any) -> bool:
    return list(value) == ["x", "y"] and type(value["x"]) is int and -5 <= value["x"] <= 12 and type(value["y"]) is bool


SCHEMAS: list[tuple[dict[str, Any] | bool, Callable[[Any], bool]]] = [
    ({"enum": ["red", 'gr"een', 3, None, {"a": 1}]}, lambda v: v in ("red", 'gr"een', 3, None, {"a": 1})),
    (POINT, is_point),
    (
        {"type": "array", "items": POINT, "minItems": 2, "maxItems": 3},
        lambda v: 2 <= len(v) <= 3 and all(map(is_point, v)),
    ),
    ({"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"}, lambda v: re.fullmatch(r"[A-Z]{2}-\d{3}", v) is not None),
    ({"type": "string", "minLength": 3, "maxLength": 5}, lambda v: 3 <= len(v) <= 5),
    ({"anyOf": [{"const": 7}, POINT]}, lambda v: v == 7 or is_point(v)),
    (
        {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
        lambda v: v is None or v in range(10),
    ),
    (
        {"$defs": {"p": POINT}, "type": "array", "items": {"$ref": "#/$defs/p"}, "minItems": 1},
        lambda v: v and all(map(is_point, v)),
    ),
    (
        {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
        lambda v: type(v[0]) is bool and v[1:] == [None],
    ),
    ({"type": "string", "format": "date"}, lambda v: re.fullmatch(r"\d{4}-\d\d-\d\d", v) is not None),
    (True, lambda _: True),
]


@pytest.mark.parametrize(("schema", "fits"), SCHEMAS, ids=lambda each: json.dumps(each) if not callable(each) else "")
def test_noise_makes_json_that_fits_the_schema(
    tokenizer: Tokenizer, schema: dict[str, Any], fits: Callable[[Any], bool]
) -> None:
    texts = {generate(tokenizer, Grammar("json_schema", json.dumps(schema)), seed) for seed in range(8)}
    assert len(texts) > 1
    for text in texts:
        assert fits(json.loads(text)), text


def test_noise_makes_some_json_object(tokenizer: Tokenizer) -> None:
    texts = {generate(tokenizer, Grammar("json_object"), seed) for seed in range(8)}
    assert len(texts) > 1
    assert all(isinstance(json.loads(text), dict) for text in texts)


def test_noise_makes_what_a_lark_grammar_says(tokenizer: Tokenizer) -> None:
    grammar = Grammar("lark", 'start: "sum(" NUMBER ("," NUMBER){1,3} ")"\nNUMBER: /[1-9][0-9]{0,2}/')
    for seed in range(8):
        assert re.fullmatch(r"sum\([1-9]\d{0,2}(,[1-9]\d{0,2}){1,3}\)", generate(tokenizer, grammar, seed))


@pytest.mark.parametrize("trigger", ["<ff>", "ff>", "<", CALL])
def test_from_the_trigger_on_the_grammar_holds(tokenizer: Tokenizer, trigger: str) -> None:
    for seed in range(8):
        text = generate(tokenizer, Grammar("json_schema", json.dumps(POINT), trigger), seed, forced=f"é {trigger}")
        before, found, after = text.partition(trigger)
        assert (before, found) == ("é ", trigger)
        assert is_point(json.loads(after)), text


def test_before_a_trigger_anything_may_come_and_the_end_too(tokenizer: Tokenizer) -> None:
    matcher = Grammars(tokenizer).matcher(Grammar("lark", 'start: "(" /[0-9]/ ")"', trigger="<ff>"))
    for token in tokenizer.encode(f"é <f{MARK}f>x<f", special_tokens=False):
        assert token in allowed(tokenizer, matcher)
        matcher.accept(token)
    assert tokenizer.eos_ids <= allowed(tokenizer, matcher)
    spans = {tokenizer.token_bytes(i) for i in allowed(tokenizer, matcher)}
    assert b"f>" in spans
    assert not spans & {b'f>{"', b'f>x{"', b"f>\n"}
    text = generate(tokenizer, Grammar("lark", 'start: "(" /[0-9]/ ")"', trigger="<ff>"), 0, forced="<ff>")
    assert re.fullmatch(r"<ff>\(\d\)", text)


def allowed(tokenizer: Tokenizer, matcher: Any) -> set[int]:
    logits = torch.zeros(tokenizer.vocab_size + PADDING)
    matcher.forbid(logits)
    return set(logits.isfinite().nonzero()[:, 0].tolist())


def test_what_is_complete_can_only_end(tokenizer: Tokenizer) -> None:
    matcher = Grammars(tokenizer).matcher(Grammar("json_schema", '{"const": "é"}'))
    for token in tokenizer.encode('"é"', special_tokens=False):
        assert not matcher.finished
        assert not tokenizer.eos_ids & allowed(tokenizer, matcher)
        matcher.accept(token)
    assert matcher.finished
    assert allowed(tokenizer, matcher) == tokenizer.eos_ids
    [eos] = tokenizer.eos_ids
    matcher.accept(eos)
    assert allowed(tokenizer, matcher) == tokenizer.eos_ids


def test_sessions_with_the_same_grammar_are_apart(tokenizer: Tokenizer) -> None:
    grammars, grammar = Grammars(tokenizer), Grammar("json_object")
    first, second = grammars.matcher(grammar), grammars.matcher(grammar)
    fresh = allowed(tokenizer, second)
    first.accept(tokenizer.encode("{", special_tokens=False)[0])
    assert allowed(tokenizer, second) == fresh != allowed(tokenizer, first)


def test_blanks_come_to_an_end(tokenizer: Tokenizer) -> None:
    matcher = Grammars(tokenizer).matcher(Grammar("json_object"))
    brace, blank = tokenizer.encode("{\n", special_tokens=False)
    matcher.accept(brace)
    for _ in range(40):
        matcher.accept(blank)
    assert blank not in allowed(tokenizer, matcher)


def test_a_token_that_does_not_fit_is_an_error_of_this_session(tokenizer: Tokenizer) -> None:
    matcher = Grammars(tokenizer).matcher(Grammar("json_object"))
    with pytest.raises(StageError, match="grammar"):
        matcher.accept(tokenizer.encode("x", special_tokens=False)[0])
    assert allowed(tokenizer, matcher) == tokenizer.eos_ids


@pytest.mark.parametrize("nothing", ["/[^\\s\\S]/", "X\nX: /b/ & /c/"])
def test_a_text_that_can_not_go_on_ends(tokenizer: Tokenizer, nothing: str) -> None:
    matcher = Grammars(tokenizer).matcher(Grammar("lark", f'start: "a" {nothing}'))
    matcher.accept(tokenizer.encode("a", special_tokens=False)[0])
    assert tokenizer.eos_ids == allowed(tokenizer, matcher)
    for _ in range(2):
        matcher.accept(next(iter(tokenizer.eos_ids)))


def test_a_schema_in_a_lark_grammar_is_named_and_no_grammar_is_printed() -> None:
    schemas = {"tool 'f'": {"type": "object"}, "tool 'g'": {"properties": {"a": {"type": "x"}}}}
    rules = [f"c{i}: %json {json.dumps(schema)}" for i, schema in enumerate(schemas.values())]
    told = tuple((name, json.dumps(schema)) for name, schema in schemas.items())
    with pytest.raises(RequestError) as caught:
        Grammars(TOKENIZERS["byte-level"]).matcher(Grammar("lark", "\n".join(["start: c0 | c1", *rules]), schemas=told))
    assert str(caught.value).startswith("the JSON schema of tool 'g' can't be enforced: at /properties/a: Invalid type")
    assert caught.value.param == "tool 'g'"
    with pytest.raises(RequestError) as caught:
        Grammars(TOKENIZERS["byte-level"]).matcher(Grammar("lark", "start: c0\nc0: missing"))
    assert "\n" not in str(caught.value)
    assert "start:" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "place", "told"),
    [
        ({"type": "objekt"}, "its root", "objekt"),
        ({"properties": {"a/b": {"type": "array", "items": {"type": "x"}}}}, "/properties/a~1b/items", "type: x"),
        ({"anyOf": [{"type": "null"}, {"not": {}}]}, "/anyOf/1", "not"),
        ({"$defs": {"p": {"type": "string", "pattern": "(?=a)b"}}, "$ref": "#/$defs/p"}, "/$defs/p", "look-around"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "/properties/a", "nowhere"),
        ({"type": "string", "format": "colour"}, "its root", "colour"),
        ([], "its root", "object"),
        (False, "its root", "false"),
    ],
)  # fmt: skip
def test_a_schema_that_can_not_be_enforced_is_refused_and_the_place_told(schema: Any, place: str, told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        Grammars(TOKENIZERS["byte-level"]).matcher(Grammar("json_schema", json.dumps(schema)))
    assert caught.value.param == "grammar"
    assert caught.value.message.startswith(f"at {place}: ")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_a_schema_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        Grammars(TOKENIZERS["byte-level"]).matcher(Grammar("json_schema", text))
    assert caught.value.param == "grammar"


def test_a_schema_that_nothing_fits_is_refused() -> None:
    with pytest.raises(RequestError, match="nothing can be written that fits") as caught:
        Grammars(TOKENIZERS["byte-level"]).matcher(Grammar("json_schema", '{"$ref": "#"}'))
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("trigger", ["", "<ff>"])
@pytest.mark.parametrize(
    ("text", "told"), [("start: missing", "missing"), ('start: %json {"type": "x"}', "Invalid type")]
)
def test_a_wrong_lark_grammar_is_refused(text: str, told: str, trigger: str) -> None:
    with pytest.raises(RequestError, match=told):
        Grammars(TOKENIZERS["byte-level"]).matcher(Grammar("lark", text, trigger))


def test_a_model_that_can_not_end_takes_no_grammar() -> None:
    tokenizer = tokenizer_of("byte-level")
    tokenizer.eos_ids = frozenset()
    with pytest.raises(RequestError, match="end"):
        Grammars(tokenizer).matcher(Grammar("json_object"))
