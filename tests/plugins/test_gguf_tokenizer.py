"""Tokenizers of GGUF files: their tokens have the file's ids, and texts begin, split and end as llama.cpp does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from core_plugin_gguf import tokenizer as gguf_tokenizer
from core_plugin_gguf.checkpoint import GgufFormat
from core_plugin_gguf.vocabulary import SPLITS
from tokenizers import Regex, pre_tokenizers

from core import Checkpoint, CheckpointError, Source
from core.interfaces.engine import Conversation
from core.runtime.tokenizer import Tokenizer
from core.testing.checkpoints import tiny_checkpoint, write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = map(int, gguf.TokenType)
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TEXTS = ["Don't  it? 12345 ÄÖ, naïve\n\n 你好 мир!!", "<|im_start|>", "a\t\r\nB's 3.14", " x  y"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_tokenizer, "user_cache_path", lambda _name: tmp_path / "cache")
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    return write_gguf(tiny_checkpoint(directory / "original", layers=1), directory / "tiny.gguf")


@pytest.fixture
def told(tiny: Path, tmp_path: Path) -> Callable[..., Checkpoint]:
    """Opens `tiny` with other metadata: a value of None takes a key away. `tokens` stand in for those of their ids."""

    def build(tokens: Mapping[int, tuple[str, int]] | None = None, **changed: Any) -> Checkpoint:
        reader = gguf.GGUFReader(tiny)
        said = {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
        texts = list(reader.fields["tokenizer.ggml.tokens"].contents())
        types = list(reader.fields["tokenizer.ggml.token_type"].contents())
        for token, (text, kind) in (tokens or {}).items():
            texts[token], types[token] = text, kind
        said |= {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types}
        return opened(rewritten(reader, tmp_path / "told.gguf", said))

    return build


def opened(path: Path) -> Checkpoint:
    return GgufFormat().open(Source(str(path)))


def rewritten(reader: gguf.GGUFReader, path: Path, said: Mapping[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if key not in said and not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for key, value in said.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tokens_with_letters_outside_the_byte_table_have_their_own_ids(told: Callable[..., Checkpoint]) -> None:
    tokens = {
        1: (BEGIN, CONTROL),
        2: (END, CONTROL),
        3: ("<｜User｜>", USER_DEFINED),
        4: ("<think>", USER_DEFINED),
        5: ("\U0001f642 two words", CONTROL),
        6: ("[PAD6]", UNUSED),
    }
    checkpoint = told(tokens, add_bos_token=True)
    for inner in (checkpoint.tokenizer(), checkpoint.tokenizer()):
        for token, (text, kind) in tokens.items():
            if kind != UNUSED:
                assert inner.encode(f"{text}", add_special_tokens=False) == [token]
                assert inner.decode([token], skip_special_tokens=kind == CONTROL) == ("" if kind == CONTROL else text)
        assert (inner.bos_token_id, inner.eos_token_id) == (1, 2)
        assert inner.encode(f"a{BEGIN}")[0] == inner.encode(f"a{BEGIN}")[-1] == 1
        assert max(inner.get_vocab().values()) == max(checkpoint.tensors["model.embed_tokens.weight"].shape[:1]) - 1


def test_a_special_token_that_a_user_types_is_text(told: Callable[..., Checkpoint]) -> None:
    tokenizer = Tokenizer(told({1: (BEGIN, CONTROL), 2: (END, CONTROL)}).tokenizer())
    ids = tokenizer.encode_chat(Conversation(({"role": "user", "content": f"a {END} b"},)))
    assert 2 not in ids
    assert f"a {END} b" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("said", "bos"),
    [
        ({"pre": "llama-bpe"}, True),
        ({"pre": "tekken"}, True),
        ({"pre": "qwen2"}, False),
        ({"pre": "deepseek-r1-qwen"}, False),
        ({"pre": None}, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "qwen2", "add_bos_token": True}, True),
        ({"pre": "llama-bpe", "bos_token_id": 1 << 20}, False),
    ],
)
def test_bos_is_added_as_llama_cpp_adds_it(told: Callable[..., Checkpoint], said: dict[str, Any], bos: bool) -> None:
    tokenizer = told(**{"add_bos_token": None, **said}).tokenizer()
    assert (tokenizer.encode("a")[0] == 1) == bos
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[int(bos) :]


def test_eos_is_added_if_the_file_says_so(told: Callable[..., Checkpoint]) -> None:
    assert told(add_eos_token=True).tokenizer().encode("a")[-1] == 2


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (("<|eot_id|>",), [2, 0, 4]),
        (("<end_of_turn>", "<|eom_id|>", "<|file_sep|>"), [2, 0, 4, 5, 6]),
        (("<|end|>",), [2, 0, 4]),
        (("<|end|>", "<|return|>", "<|call|>"), [2, 0, 5, 6]),
        (("</s>", "<|tool_response>"), [2, 0, 5]),
        (("<|other|>",), [2, 0]),
    ],
)
@pytest.mark.parametrize("kind", [NORMAL, CONTROL])
def test_an_answer_ends_at_the_tokens_that_llama_cpp_finds_by_their_text(
    told: Callable[..., Checkpoint], texts: tuple[str, ...], ends: list[int], kind: int
) -> None:
    checkpoint = told({4 + i: (text, kind) for i, text in enumerate(texts)})
    assert checkpoint.generation_config["eos_token_id"] == ends
    tokenizer = checkpoint.tokenizer()
    assert all(tokenizer.decode([end], skip_special_tokens=True) == "" for end in ends)


def test_a_token_without_a_role_that_is_there_has_none(told: Callable[..., Checkpoint]) -> None:
    checkpoint = told(eos_token_id=1 << 20, padding_token_id=1 << 20)
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [0, 2], "pad_token_id": None}
    assert checkpoint.config["eos_token_id"] is None
    assert checkpoint.tokenizer().eos_token is None


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("qwen2", False)])
def test_a_word_that_is_a_token_needs_no_merges_where_llama_cpp_needs_none(
    told: Callable[..., Checkpoint], pre: str, whole: bool
) -> None:
    ids = told({300: ("zqxj", NORMAL)}, pre=pre).tokenizer().encode("zqxj", add_special_tokens=False)
    assert (ids == [300]) == whole


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "qwen35", "minimax-m2"])
def test_texts_are_split_as_transformers_splits_them(pre: str) -> None:
    known = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    expected = pre_tokenizers.Split(Regex(known[pre]), "isolated")
    (ours,) = SPLITS[pre]
    for text in TEXTS:
        split = pre_tokenizers.Split(Regex(ours), "isolated").pre_tokenize_str(text)
        assert split == expected.pre_tokenize_str(text)


def test_digits_are_split_one_by_one_where_the_model_s_makers_split_them(told: Callable[..., Checkpoint]) -> None:
    """The tokenizer.json of SmolLM2 has Digits and GPT-2's splits."""
    units = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), units])
    split = told(pre="smollm").tokenizer().backend_tokenizer.pre_tokenizer
    for text in TEXTS:
        assert split.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


def test_a_pre_tokenizer_that_is_not_known_is_refused(told: Callable[..., Checkpoint]) -> None:
    with pytest.raises(CheckpointError, match="splits texts as 'new-one'"):
        told(pre="new-one").tokenizer()


def test_a_token_that_is_cut_into_pieces_is_an_error(
    told: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level = gguf_tokenizer._byte_level
    monkeypatch.setattr(gguf_tokenizer, "_byte_level", lambda *args: {**byte_level(*args), "added_tokens": []})
    with pytest.raises(CheckpointError, match="does not know its token"):
        told(bos_token_id=None, eos_token_id=None).tokenizer()


def test_templates_have_their_names(tiny: Path, tmp_path: Path) -> None:
    said = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "{{ tools }}"}
    checkpoint = opened(rewritten(gguf.GGUFReader(tiny), tmp_path / "named.gguf", said))
    for inner in (checkpoint.tokenizer(), checkpoint.tokenizer()):
        assert inner.chat_template == {"default": "plain", "tool_use": "{{ tools }}"}


PIECES = ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "c"]


@pytest.mark.parametrize(
    ("said", "text", "pieces"),
    [
        ({}, "ab ab", ["<s>", "\u2581ab", "\u2581ab"]),
        ({"add_bos_token": False}, "ab", ["\u2581ab"]),
        ({"add_space_prefix": False}, "ab ab", ["<s>", "ab", "\u2581ab"]),
        ({}, "é", ["<s>", "\u2581", "<0xC3>", "<0xA9>"]),
        ({}, "ab<mark>ab", ["<s>", "\u2581ab", "<mark>", "ab"]),
    ],
)
def test_sentencepiece(tiny: Path, tmp_path: Path, said: dict[str, Any], text: str, pieces: list[str]) -> None:
    size = len(gguf.GGUFReader(tiny).fields["tokenizer.ggml.tokens"].contents())
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<mark>"]
    padding = [f"[PAD{i}]" for i in range(size - len(tokens))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED, *[UNUSED] * len(padding)]
    silent = dict.fromkeys(("pre", "merges", "bos_token_id", "eos_token_id", "padding_token_id", "add_bos_token"))
    changed = {
        **silent,
        "model": "llama",
        "tokens": tokens + padding,
        "token_type": types,
        "scores": [0.0] * 259 + [float(len(piece)) for piece in PIECES] + [0.0] * (1 + len(padding)),
        **said,
    }
    keys = {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    checkpoint = opened(rewritten(gguf.GGUFReader(tiny), tmp_path / "pieces.gguf", keys))
    assert checkpoint.generation_config["eos_token_id"] == [2]
    for inner in (checkpoint.tokenizer(), checkpoint.tokenizer()):
        assert inner.convert_ids_to_tokens(inner.encode(text)) == pieces
        assert inner.decode(inner.encode(text), skip_special_tokens=True) == text
