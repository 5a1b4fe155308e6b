"""Log probabilities in the two shapes that the OpenAI API has for them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from core.gateway.schemas.chat import ChatLogprobs, TopLogprob
from core.gateway.schemas.chat import TokenLogprob as ChatTokenLogprob
from core.gateway.schemas.completions import CompletionLogprobs
from core.interfaces.engine import TokenLogprob

LEAST = -9999.0
"""Stands for a probability of zero, whose logarithm JSON can't write; OpenAI's own choice."""


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenLogprob(token.text, list(token.raw), _finite(token), [_top(each) for each in token.top])
            for token in tokens
        ]
    )


def _top(token: TokenLogprob) -> TopLogprob:
    return TopLogprob(token.text, list(token.raw), _finite(token))


class TokenTable:
    """Lists a choice's tokens as they come, each with its place in the choice's text.

    `shift` is where the first token begins; one that begins before the text counts as its beginning.
    """

    def __init__(self, alternatives: bool, shift: int = 0) -> None:
        self._alternatives = alternatives
        self._offset = shift
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def list(self, tokens: Iterable[TokenLogprob]) -> CompletionLogprobs:
        listed = CompletionLogprobs([], [], [] if self._alternatives else None, [])
        for token in tokens:
            listed.tokens.append(_name(token))
            listed.token_logprobs.append(None if token.logprob is None else _finite(token))
            if listed.top_logprobs is not None:
                listed.top_logprobs.append(_alternatives(token))
            listed.text_offset.append(max(0, self._offset))
            self._offset += len(self._decode(token.raw))
        return listed


def _alternatives(token: TokenLogprob) -> dict[str, float] | None:
    """The likeliest tokens and the token itself; of two that read alike, the likelier."""
    if token.logprob is None:
        return None
    alternatives: dict[str, float] = {}
    for each in (*token.top, token):
        alternatives.setdefault(_name(each), _finite(each))
    return alternatives


def _name(token: TokenLogprob) -> str:
    try:
        token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
    return token.text


def _finite(token: TokenLogprob) -> float:
    return LEAST if token.logprob is None else max(token.logprob, LEAST)
