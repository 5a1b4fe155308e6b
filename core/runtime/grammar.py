"""Grammars that a generation's text must fit: which tokens may come next, over whatever borders tokens have.

llguidance does the parsing (github.com/guidance-ai/llguidance), of JSON schemas and of its dialect of Lark.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import islice, takewhile
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from core.errors import RequestError, StageError
from core.interfaces.engine import Grammar
from core.runtime.tokenizer import Tokenizer

_KEPT = 64
"""Compiled grammars: clients send the same ones again and again."""
_BLANK = r"[ \n\r\t]{1,40}"
"""Between what JSON is made of. It ends: a model that is unsure likes to go on with blanks."""
_MAX_SIBLINGS = 100
_PLACE_SECONDS = 1.0
"""Parts of a faulty schema that are looked at, at each depth, to say where the fault is; and for how long at most."""


class Grammars:
    """Compiles grammars for one model's tokenizer, and keeps what was compiled. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled = lru_cache(_KEPT)(self._compile)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A fresh one for one generation. Compiling takes milliseconds, of a large schema a second.

        Raises RequestError where the schema or grammar is wrong, or asks for what llguidance can't enforce.
        """
        return Matcher(self._compiled(grammar).deep_copy())

    def _compile(self, grammar: Grammar) -> LLMatcher:
        grammars = [{"name": "body", **self._body(grammar)}]
        if grammar.trigger:
            grammars.insert(0, {"name": "start", "lark_grammar": self._from_trigger(grammar)})
        matcher = LLMatcher(self._vocabulary, json.dumps({"grammars": grammars}), log_level=0)
        if matcher.is_error():
            for name, text in grammar.schemas:
                self._schema(text, name)
            raise RequestError(
                "the grammar can't be compiled", _without_source(matcher.get_error()), "change it", param="grammar"
            )
        matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError("nothing can be written that fits the grammar", hint="change it", param="grammar")
        return matcher

    def _body(self, grammar: Grammar) -> dict[str, Any]:
        match grammar.kind:
            case "json_object":
                return _json({"type": "object"})
            case "json_schema":
                return _json(self._schema(grammar.text))
            case "lark":
                return {"lark_grammar": grammar.text}

    def _schema(self, text: str, name: str = "") -> Any:
        """The schema of that name, decoded. Raises RequestError where it can't be enforced."""
        param = name or "grammar"
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError("the schema is not JSON", str(error), param=param) from None
        if fault := self._fault(schema):
            raise RequestError(
                f"the JSON schema{f' of {name}' if name else ''} can't be enforced",
                f"at {self._place(schema, fault) or 'its root'}: {_one_line(fault)}",
                "change it",
                param=param,
            )
        return schema

    def _fault(self, schema: Any) -> str:
        """What llguidance has against a JSON schema, without the way that led there; nothing if it is fine."""
        fault = LLMatcher.validate_grammar(json.dumps({"grammars": [_json(schema)]}), self._vocabulary)
        return fault.partition("while processing json-schema:")[0].strip()

    def _place(self, schema: Any, fault: str) -> str:
        """The JSON pointer (RFC 6901) to the innermost part that has the same fault by itself."""
        root = schema if isinstance(schema, dict) else {}
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        pointer, inside = "", schema
        until = time.monotonic() + _PLACE_SECONDS
        while inside is not None:
            parts = takewhile(lambda _: time.monotonic() < until, islice(_parts(inside), _MAX_SIBLINGS))
            faulty = (
                (place, part)
                for place, part in parts
                if self._fault({**definitions, **part} if isinstance(part, dict) else part) == fault
            )
            place, inside = next(faulty, ("", None))
            pointer += place
        return pointer

    def _from_trigger(self, grammar: Grammar) -> str:
        """Anything up to the trigger, in text or a special token of that name, and from there the grammar `body`."""
        triggers = [i for i in self._specials if self._tokenizer.token_bytes(i) == grammar.trigger.encode()]
        others = [i for i in self._specials if i not in triggers and i not in self._tokenizer.eos_ids]
        blank = "" if grammar.kind == "lark" else "blank?"
        return "\n".join(
            [
                f"start: {'(TEXT? special)*' if others else ''} (TEXT | trigger {blank} @body)",
                f"trigger: text_trigger {' '.join(f'| TEXT? <[{i}]>' for i in triggers)}",
                f"text_trigger[lazy]: TEXT {json.dumps(grammar.trigger)}",
                f"special: <[{','.join(map(str, others))}]>" if others else "",
                f"blank: /{_BLANK}/" if blank else "",
                "TEXT: /(?s:.*)/",
            ]
        )

    @cached_property
    def _specials(self) -> list[int]:
        return [i for i in range(self._tokenizer.vocab_size) if self._tokenizer.is_special(i)]

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        words = _Vocabulary(self._tokenizer)
        if not words.eos_ids:
            raise RequestError(
                "this model can't follow a grammar", "it has no token with which to end", param="grammar"
            )
        return LLTokenizer(TokenizerWrapper(words), eos_token=words.eos_ids)


class Matcher:
    """How far a generation's text has come in its grammar; the Constraint of core.runtime.sampling.

    A text that can't go on, where its grammar leads nowhere or has become too complex to follow, ends as it is.
    """

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner
        self._allowed = b""
        """A bit for each token that may come next, once that was asked."""

    def forbid(self, logits: Tensor) -> None:
        """Sets to -inf, in logits [vocab], those of the tokens that can't come next.

        Where the text is complete or can't go on, a token that ends it is left.
        """
        self._allowed = self._inner.compute_bitmask()
        bits = np.frombuffer(self._allowed, dtype=np.uint8)
        forbidden = torch.from_numpy(np.unpackbits(~bits, bitorder="little")[: len(logits)]).bool()
        logits[: len(forbidden)].masked_fill_(forbidden.to(logits.device), -torch.inf)
        logits[len(forbidden) :] = -torch.inf

    def accept(self, token: int) -> None:
        """Raises StageError for a token that does not fit."""
        if self._inner.consume_token(token):
            return
        if not self._allowed or not self._allowed[token // 8] >> token % 8 & 1:
            raise StageError("the text has left its grammar", _without_source(self._inner.get_error()))

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._inner.is_stopped()


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_ids = sorted(tokenizer.eos_ids.intersection(ids))
        self.eos_token_id = next(iter(self.eos_ids), None)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i) or i in tokenizer.eos_ids]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace"), special_tokens=False)


def _json(schema: Any) -> dict[str, Any]:
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": _BLANK}, **schema}
    return {"json_schema": schema}


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside one, and where they are in it."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        match key, value:
            case "$defs" | "definitions" | "properties" | "patternProperties", dict():
                yield from ((f"/{key}/{_escaped(name)}", part) for name, part in value.items())
            case "items" | "additionalProperties", dict() | bool():
                yield f"/{key}", value
            case "anyOf" | "oneOf" | "allOf" | "prefixItems", list():
                yield from ((f"/{key}/{index}", part) for index, part in enumerate(value))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _without_source(message: str) -> str:
    """What llguidance has against a grammar, without the lines of the grammar that it prints."""
    return re.sub(r"^at \d+\(\d+\): ", "", message.partition("\n")[0])


def _one_line(message: str) -> str:
    return " ".join(message.split())
