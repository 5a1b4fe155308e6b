"""Text to token ids and back: the chat template, and detokenising as the tokens come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from core.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_WINDOW = 8
"""Tokens kept as context: more than the 4 bytes of a character, and a first one whose leading space decoders strip."""


class Tokenizer:
    """A model's tokenizer. `eos_token_ids` are those of config.json and generation_config.json.

    `eos_ids` are all tokens that end a generation: those, and the tokenizer's own.
    """

    def __init__(self, inner: PreTrainedTokenizerBase, *, eos_token_ids: Iterable[int] = ()) -> None:
        self._inner = inner
        own = () if inner.eos_token_id is None else (inner.eos_token_id,)
        self.eos_ids: frozenset[int] = frozenset((*eos_token_ids, *own))
        self._special = frozenset(i for i, token in inner.added_tokens_decoder.items() if token.special)
        self._fallback_bytes = _fallback_bytes(inner)

    def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt, with the special tokens that the tokenizer adds by default."""
        return list(self._inner.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation in the model's own chat template, ready for the assistant's answer.

        Raises RequestError where the model has no chat template, or its template refuses the messages.
        """
        if not self._inner.chat_template:
            raise RequestError(
                "this model has no chat template",
                "it continues text and takes no messages",
                "use /v1/completions with a prompt",
                param="messages",
            )
        try:
            ids = self._inner.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        # A template is a program of the model's makers: it raises for wrong roles, and trips over other contents.
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(
                "the model's chat template refuses these messages", str(error), "change the messages", param="messages"
            ) from error
        return list(ids)

    def text_stream(self, stop: Sequence[str] = ()) -> TextStream:
        """A fresh stream for one generation that ends at any of `stop`. Raises RequestError for an empty one."""
        if "" in stop:
            raise RequestError("a stop string is empty", hint="leave it out", param="stop")
        return TextStream(_Detokenizer(self), _StopFilter(stop))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens, spaces as the model wrote them."""
        text: str = self._inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's chat template, where it has one."""
        template: str | None = self._inner.chat_template
        return template

    def decode_whole(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        text: str = self._inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def is_silent(self, token_id: int) -> bool:
        """Whether the token has no part in any text: a special one, or one that only pads the vocabulary."""
        return token_id in self._special or self._inner.convert_ids_to_tokens(token_id) is None

    def is_fallback_byte(self, token_id: int) -> bool:
        """Whether the token is one of sentencepiece's single bytes, `<0x00>` to `<0xFF>`."""
        return token_id in self._fallback_bytes


class TextStream:
    """The text of one generation, piece by piece; made by `Tokenizer.text_stream`.

    The pieces together are the decoded text of all tokens, cut before the stop string that is complete first. No
    piece ends within a character or with what may become a stop string.
    """

    def __init__(self, detokenizer: _Detokenizer, stops: _StopFilter) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared: nothing comes after it."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """The text that is safe to send after this token; often empty. Its cost is independent of the length so far."""
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """What was held back, once no token follows. A character left incomplete comes out as U+FFFD."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()


class _Detokenizer:
    """Decodes a window of the last tokens, and hands out each time what the newest one made final.

    Only the last character of a byte-level text can still change: it is U+FFFD until its bytes are complete. A run of
    sentencepiece's fallback bytes is decoded as a whole or becomes U+FFFD as a whole, so it is final when it ends.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._sent = 0

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_silent(token_id):
            return ""
        self._ids.append(token_id)
        if self._tokenizer.is_fallback_byte(token_id):
            return ""
        text = self._tokenizer.decode(self._ids)
        final = len(text.removesuffix(_REPLACEMENT))
        piece = text[self._sent : final]
        self._sent = final
        if len(self._ids) >= 2 * _WINDOW:
            self._slide(held=len(text) - final)
        return piece

    def finish(self) -> str:
        text = self._tokenizer.decode(self._ids)
        piece = text[self._sent :]
        self._sent = len(text)
        return piece

    def _slide(self, held: int) -> None:
        """Forgets the older tokens. The shorter window may decode otherwise at its start, but has the same end."""
        del self._ids[:-_WINDOW]
        self._sent = len(self._tokenizer.decode(self._ids)) - held


class _StopFilter:
    """Passes text on up to the stop string that is complete first, holding back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stopped = False
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        passed = len(text) - self._beginning_of_stop(text)
        self._held = text[passed:]
        return text[:passed]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _beginning_of_stop(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        lengths = range(min(len(text), self._longest - 1), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)


def _fallback_bytes(inner: PreTrainedTokenizerBase) -> frozenset[int]:
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = dict(zip(names, inner.convert_tokens_to_ids(names), strict=True))
    return frozenset(i for name, i in ids.items() if i is not None and inner.convert_ids_to_tokens(i) == name)
