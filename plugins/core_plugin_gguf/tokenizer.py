"""A GGUF file's tokenizer. Converting it takes seconds, so the result is kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from core import CheckpointError
from core_plugin_gguf.header import MERGES, parse, without_tensors
from core_plugin_gguf.vocabulary import IGNORE_MERGES, SPLITS, Vocabulary

CONVERSION = 2
"""Counts up when what is kept of a file becomes another tokenizer."""


def load_tokenizer(metadata: bytes, vocabulary: Vocabulary, file: str) -> Any:
    """The tokenizer of `file`, which begins with `metadata`, as transformers'. Raises CheckpointError."""
    import transformers

    root = user_cache_path("core") / "tokenizers"
    entry = root / f"{hashlib.sha256(metadata).hexdigest()[:32]}-{transformers.__version__}-{CONVERSION}"
    if entry.is_dir():
        try:
            return _checked(_kept(entry), vocabulary, file)
        # A damaged entry may fail in any way: it is made again.
        except Exception:
            shutil.rmtree(entry, ignore_errors=True)
    tokenizer = _checked(_converted(metadata, vocabulary, file), vocabulary, file)
    try:
        _keep(tokenizer, root, entry)
    except OSError:
        return tokenizer
    return _kept(entry)


def _converted(metadata: bytes, vocabulary: Vocabulary, file: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        made = _byte_level(metadata, vocabulary, file) if vocabulary.is_byte_level else _pieces(metadata, vocabulary)
        with tempfile.TemporaryDirectory() as directory:
            written = Path(directory) / "tokenizer.json"
            written.write_text(json.dumps(made), encoding="utf-8")
            return PreTrainedTokenizerFast(
                tokenizer_file=str(written),
                bos_token=vocabulary.text_of("bos"),
                eos_token=vocabulary.text_of("eos"),
                unk_token=vocabulary.text_of("unknown"),
                pad_token=vocabulary.text_of("padding"),
                add_bos_token=vocabulary.adds_bos and vocabulary.id_of("bos") is not None,
                add_eos_token=vocabulary.adds_eos and vocabulary.id_of("eos") is not None,
                chat_template=vocabulary.chat_template(),
                clean_up_tokenization_spaces=False,
            )
    except CheckpointError:
        raise
    # The file's own tokens and merges decide what fails: the tokenizers library raises plain Exception.
    except Exception as error:
        raise CheckpointError(f"the tokenizer of {file} can't be loaded", str(error)) from error


def _byte_level(metadata: bytes, vocabulary: Vocabulary, file: str) -> dict[str, Any]:
    """A tokenizer.json of byte pairs."""
    splits = SPLITS.get(vocabulary.pre_tokenizer)
    if splits is None:
        raise CheckpointError(
            f"{file} splits texts as {vocabulary.pre_tokenizer!r}, which is not known here",
            hint="use the model's safetensors",
        )
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    merges = (_merge(text.decode()) for text in _array(metadata, MERGES, file))
    units = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    rules = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in splits
    ]
    return {
        "added_tokens": _added_tokens(vocabulary),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*rules, units]},
        "decoder": units,
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": [pair for pair in merges if {*pair, "".join(pair)} <= ids.keys()],
            "ignore_merges": vocabulary.pre_tokenizer in IGNORE_MERGES,
        },
    }


def _array(metadata: bytes, key: str, file: str) -> Sequence[bytes]:
    alone = without_tensors(metadata)
    array: Sequence[bytes] = parse(memoryview(alone), len(alone), file, (key,)).metadata.get(key, ())
    return array


def _merge(text: str) -> tuple[str, str]:
    """What lies on either side of a space that isn't the first character."""
    middle = text.index(" ", 1)
    return text[:middle], text[middle + 1 :]


def _pieces(metadata: bytes, vocabulary: Vocabulary) -> dict[str, Any]:
    """A tokenizer.json of sentencepiece's pieces: transformers', with all tokens that are matched as a whole."""
    made: dict[str, Any] = json.loads(_by_transformers(metadata).backend_tokenizer.to_str())
    model = {**made["model"], "vocab": {text: token for token, text in enumerate(vocabulary.tokens)}}
    mended = {**made, "model": model, "post_processor": None, "added_tokens": _added_tokens(vocabulary)}
    return mended if vocabulary.adds_space else _without_space(mended)


def _by_transformers(metadata: bytes) -> Any:
    """From a copy that lies alone: transformers would mix in the tokenizer files that lie beside it."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as directory:
        alone = Path(directory) / "tokenizer.gguf"
        alone.write_bytes(without_tensors(metadata))
        return AutoTokenizer.from_pretrained(directory, gguf_file=alone.name)


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": s.token, "content": s.text, "special": s.control, **plain} for s in vocabulary.specials()]


def _without_space(value: Any) -> Any:
    """`value`, part of a tokenizer.json, where no text begins with a space of its own."""
    match value:
        case {"type": "Metaspace"}:
            return {**value, "prepend_scheme": "never"}
        case {"type": "Prepend"}:
            return {"type": "Sequence", "normalizers": []}
        case dict():
            return {key: each if key in ("vocab", "merges") else _without_space(each) for key, each in value.items()}
        case list():
            return [_without_space(each) for each in value]
        case _:
            return value


def _checked(tokenizer: Any, vocabulary: Vocabulary, file: str) -> Any:
    """Raises CheckpointError unless the tokens are the file's, and each that is matched as a whole has its own id."""
    specials = vocabulary.specials()
    wrong = [s.text for s in specials if tokenizer.encode(s.text, add_special_tokens=False) != [s.token]]
    if wrong:
        raise CheckpointError(f"the tokenizer of {file} does not know its token {wrong[0]!r}", hint="use another file")
    ids = set(tokenizer.get_vocab().values())
    if ids != set(range(len(vocabulary.tokens))):
        raise CheckpointError(f"the tokenizer of {file} has {len(ids)} tokens, and the file {len(vocabulary.tokens)}")
    return tokenizer


def _kept(entry: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(entry)


def _keep(tokenizer: Any, root: Path, entry: Path) -> None:
    """Whole or not at all: it is written elsewhere and renamed. A copy that was made meanwhile is as good."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as directory:
        written = Path(directory) / entry.name
        tokenizer.save_pretrained(written)
        if not entry.is_dir():
            written.rename(entry)
