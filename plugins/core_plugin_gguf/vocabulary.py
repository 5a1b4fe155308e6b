"""What a GGUF file says of its tokens, and what llama.cpp takes as said where a file is silent.

Sources: llama.cpp's src/llama-vocab.cpp (`llama_vocab::impl::load`), and the tokenizer.json of the models that its
pre-tokenizers are named after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf.constants import TokenType

from core import CheckpointError
from core_plugin_gguf.header import Header

_ENDS = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
ENDS = frozenset(_ENDS.split())
"""Texts of tokens that end a generation, whatever the file says of them: a turn's end, or another file's beginning."""
_NOT_ENDS = (
    ({"<|return|>", "<|call|>", "<|end|>"}, "<|end|>"),
    ({"<|flush|>", "<|calls|>", "<|end|>"}, "<|end|>"),
    ({"<|flush|>", "<|call|>", "<|end|>"}, "<|end|>"),
    ({"<|tool_response>", "</s>"}, "</s>"),
)
"""Beside the others of the set, the one ends no generation."""

_LIKE_LLAMA3 = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
_LLAMA3 = frozenset(_LIKE_LLAMA3.split())
ADD_BOS = _LLAMA3 | {"tekken", "chameleon"}
"""Pre-tokenizers whose models begin a text with the token for it, if the file doesn't say."""
IGNORE_MERGES = _LLAMA3 | {"tekken", "minicpm5", "youtu", "granite-embed-multi-97m"}
"""A word that is a token as a whole is taken as it is, also if no merges lead to it."""
_CONTROL = (TokenType.CONTROL, TokenType.UNKNOWN)
SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER, _SUFFIX = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SPLITS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (f"{_LIKE_LLAMA3} dbrx smaug-bpe glm4 chatglm-bpe", (_QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open", (_QWEN2,)),
    ("qwen35", (_QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),)),
    ("tekken", (_TEKKEN,)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", (_GPT4O,)),
    ("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum exaone4 mpt olmo jais", (_GPT2,)),
    ("trillion granite-docling", (_GPT2,)),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", (r"\p{N}", _GPT2)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
)
SPLITS: Mapping[str, tuple[str, ...]] = {name: splits for names, splits in _SPLITS for name in names.split()}
"""By what a pre-tokenizer splits a text, one after the other."""


@dataclass(frozen=True, slots=True)
class Special:
    """A token that is matched as a whole. One that is `control` is markup, and no text is made of it."""

    token: int
    text: str
    control: bool


class Vocabulary:
    """Raises CheckpointError for tokens that can't be told apart."""

    def __init__(self, header: Header, file: str) -> None:
        self._metadata = header.metadata
        self._file = file
        self.tokens = [text.decode(errors="replace") or f"[EMPTY_{i}]" for i, text in enumerate(header.tokens)]
        self._types = header.token_types
        twice = next((text for text, count in Counter(self.tokens).items() if count > 1), None)
        if twice is not None:
            raise CheckpointError(f"{file} has the token {twice!r} twice", hint="convert the model again")

    @property
    def is_byte_level(self) -> bool:
        return self._metadata.get("tokenizer.ggml.model") == "gpt2"

    @property
    def pre_tokenizer(self) -> str:
        return str(self._said("pre", "default"))

    @property
    def adds_bos(self) -> bool:
        return bool(self._said("add_bos_token", self.pre_tokenizer in ADD_BOS or not self.is_byte_level))

    @property
    def adds_eos(self) -> bool:
        return bool(self._said("add_eos_token", False))

    @property
    def adds_space(self) -> bool:
        """Whether a text that begins with a word begins as one in its midst does, with a space."""
        return bool(self._said("add_space_prefix", not self.is_byte_level))

    def id_of(self, role: str) -> int | None:
        """The token that has the role; an id that the vocabulary lacks is none."""
        given = self._said(f"{role}_token_id", None if self.is_byte_level else SENTENCEPIECE_IDS.get(role))
        return given if isinstance(given, int) and 0 <= given < len(self.tokens) else None

    def text_of(self, role: str) -> str | None:
        token = self.id_of(role)
        return None if token is None else self.tokens[token]

    def ends(self) -> list[int]:
        """All tokens that end a generation, those first that the file names."""
        named = [token for role in ("eos", "eot", "eom") if (token := self.id_of(role)) is not None]
        by_text = {text: token for token, text in enumerate(self.tokens) if text in ENDS}
        for together, no_end in _NOT_ENDS:
            if together <= by_text.keys():
                named = [token for token in named if token != by_text[no_end]]
                del by_text[no_end]
        return list(dict.fromkeys((*named, *by_text.values())))

    def specials(self) -> list[Special]:
        """The tokens that are matched as a whole; each end of a generation is control, whatever the file says."""
        control = {*self.ends(), *(i for i, kind in enumerate(self._types) if kind in _CONTROL)}
        whole = control.union(i for i, kind in enumerate(self._types) if kind == TokenType.USER_DEFINED)
        return [Special(token, self.tokens[token], token in control) for token in sorted(whole)]

    def chat_template(self) -> str | dict[str, str] | None:
        """The template, or all by name if there are several."""
        prefix = "tokenizer.chat_template"
        plain = self._metadata.get(prefix)
        named = {
            key.removeprefix(f"{prefix}."): text for key, text in self._metadata.items() if key.startswith(f"{prefix}.")
        }
        if not named:
            return plain
        return {"default": plain, **named} if plain else named

    def _said(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)
