"""Text to token ids and back, and detokenising as the tokens come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from core.errors import RequestError
from core.interfaces.engine import Conversation
from core.runtime.chat_prompts import ChatPrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_SPACE = "\u2581"
"""How sentencepiece's pieces have a space."""
_WINDOW = 8
"""Tokens kept as context: more than the 4 bytes of a character, and a first one whose leading space decoders strip."""


class Tokenizer:
    """A model's tokenizer. `eos_token_ids` are those of config.json and generation_config.json.

    `eos_ids` are all tokens that end a generation: those, and the tokenizer's own. `chat_template` takes the place of
    the model's own.
    """

    def __init__(
        self, inner: PreTrainedTokenizerBase, *, eos_token_ids: Iterable[int] = (), chat_template: str | None = None
    ) -> None:
        if chat_template is not None:
            inner.chat_template = chat_template
        self._inner = inner
        own = () if inner.eos_token_id is None else (inner.eos_token_id,)
        self.eos_ids: frozenset[int] = frozenset((*eos_token_ids, *own))
        self._special = frozenset(i for i, token in inner.added_tokens_decoder.items() if token.special)
        self.vocab_size: int = max(inner.get_vocab().values()) + 1
        """The tokens that have a name; a model may have more logits, which pad its vocabulary."""
        self._fallback_bytes = _fallback_bytes(inner)
        self._is_byte_level = _is_byte_level(inner)
        self.chat_prompts = ChatPrompts(inner)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a plain prompt, with or without the special tokens that the tokenizer adds by default."""
        return list(self._inner.encode(text, add_special_tokens=special_tokens))

    def encode_chat(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation in the model's own chat template, ready for the assistant's answer.

        Raises RequestError as ChatPrompts does.
        """
        return self.chat_prompts.ids(conversation)

    def text_stream(self, stop: Sequence[str] = (), *, special_tokens: bool = False) -> TextStream:
        """A fresh stream for one generation that ends at any of `stop`. Raises RequestError for an empty one.

        With `special_tokens` these are part of the text, and of what may be a stop string.
        """
        if "" in stop:
            raise RequestError("a stop string is empty", hint="leave it out", param="stop")
        return TextStream(_Detokenizer(self, special_tokens), _StopFilter(stop))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens, spaces as the model wrote them."""
        text: str = self._inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def decode_whole(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        text: str = self._inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for by itself: maybe part of a character. Empty for one that pads the vocabulary."""
        token = self._inner.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id in self._fallback_bytes:
            return bytes.fromhex(token[3:5])
        if not self._is_byte_level:
            return str(token).replace(_SPACE, " ").encode()
        try:
            return bytes(_BYTE_OF_UNIT[unit] for unit in token)
        except KeyError:  # An added token, whose name is its text.
            return str(token).encode()

    def is_special(self, token_id: int) -> bool:
        """Whether the token is markup between texts: none of a text's characters are made of it."""
        return token_id in self._special

    def is_padding(self, token_id: int) -> bool:
        """Whether the token only fills the vocabulary up."""
        return self._inner.convert_ids_to_tokens(token_id) is None

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
    def stop(self) -> str:
        """The stop string that has appeared, if one has: nothing comes after it."""
        return self._stops.found

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

    def __init__(self, tokenizer: Tokenizer, special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._decode = tokenizer.decode_whole if special_tokens else tokenizer.decode
        self._ids: list[int] = []
        self._sent = 0

    def push(self, token_id: int) -> str:
        if self._is_silent(token_id):
            return ""
        self._ids.append(token_id)
        if self._tokenizer.is_fallback_byte(token_id):
            return ""
        text = self._decode(self._ids)
        final = len(text.removesuffix(_REPLACEMENT))
        piece = text[self._sent : final]
        self._sent = final
        if len(self._ids) >= 2 * _WINDOW:
            self._slide(held=len(text) - final)
        return piece

    def finish(self) -> str:
        text = self._decode(self._ids)
        piece = text[self._sent :]
        self._sent = len(text)
        return piece

    def _is_silent(self, token_id: int) -> bool:
        if not self._special_tokens and self._tokenizer.is_special(token_id):
            return True
        return self._tokenizer.is_padding(token_id)

    def _slide(self, held: int) -> None:
        """Forgets the older tokens. The shorter window may decode otherwise at its start, but has the same end."""
        del self._ids[:-_WINDOW]
        self._sent = len(self._decode(self._ids)) - held


class _StopFilter:
    """Passes text on up to the stop string that is complete first, holding back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.found = ""
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        if self.found:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.found = min(found)
            self._held = ""
            return text[:start]
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


def _byte_of_unit() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


_BYTE_OF_UNIT = _byte_of_unit()


def _is_byte_level(inner: PreTrainedTokenizerBase) -> bool:
    """Only what the tokenizers library runs has a backend; the others that transformers knows are sentencepiece's."""
    backend = getattr(inner, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in str(backend.decoder)
