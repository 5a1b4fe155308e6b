"""A GGUF file's tokenizer. Converting it takes seconds, so the result is kept in the user's cache."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from core import CheckpointError
from core_plugin_gguf.header import without_tensors


def load_tokenizer(metadata: bytes, file: str) -> Any:
    """transformers' tokenizer of `file`, which begins with `metadata`. Raises CheckpointError."""
    import transformers

    root = user_cache_path("core") / "tokenizers"
    entry = root / f"{hashlib.sha256(metadata).hexdigest()[:32]}-{transformers.__version__}"
    if entry.is_dir():
        try:
            return transformers.AutoTokenizer.from_pretrained(entry)
        # A damaged entry may fail in any way: it is made again.
        except Exception:
            shutil.rmtree(entry, ignore_errors=True)
    tokenizer = _converted(metadata, file)
    try:
        _keep(tokenizer, root, entry)
    except OSError:
        return tokenizer
    return transformers.AutoTokenizer.from_pretrained(entry)


def _converted(metadata: bytes, file: str) -> Any:
    """Converts from a copy that lies alone: transformers would mix in the tokenizer files that lie beside it."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as directory:
        alone = Path(directory) / "tokenizer.gguf"
        alone.write_bytes(without_tensors(metadata))
        try:
            return AutoTokenizer.from_pretrained(directory, gguf_file=alone.name)
        # The file's own tokens and merges decide what fails: the tokenizers library raises plain Exception.
        except Exception as error:
            raise CheckpointError(f"the tokenizer of {file} can't be loaded", str(error)) from error


def _keep(tokenizer: Any, root: Path, entry: Path) -> None:
    """Whole or not at all: it is written elsewhere and renamed. A copy that was made meanwhile is as good."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as directory:
        written = Path(directory) / entry.name
        tokenizer.save_pretrained(written)
        if not entry.is_dir():
            written.rename(entry)
