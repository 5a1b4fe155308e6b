"""The head of a GGUF file, versions 2 and 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), distrusted.

The `gguf` package's own reader wraps each of a tokenizer's strings in an array, which takes seconds; arrays that are
long or hold strings are skipped here, but for the vocabulary.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from core import CheckpointError

LONGEST_ARRAY = 4096
"""Items: there is one per layer in the arrays that a config may need."""

TOKENS, TOKEN_TYPES, MERGES = (f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "merges"))

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in the file. `shape` is in torch's order, rows first."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """`metadata` lacks the arrays that were skipped; all of it, those included, ends at byte `metadata_end`.

    `tokens` are the vocabulary's texts, in UTF-8, and `token_types` what each one is, if the file says so.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    metadata_end: int
    tokens: Sequence[bytes]
    token_types: Sequence[int]


def without_tensors(metadata: bytes) -> bytes:
    """A GGUF file of nothing but the metadata that another one begins with."""
    magic_and_version, count = 8, 8
    return metadata[:magic_and_version] + bytes(count) + metadata[magic_and_version + count :]


class NeedsMore(Exception):
    """The head goes on behind the bytes that were given."""


def parse(data: memoryview, size: int, file: str, whole: Collection[str] = (TOKENS, TOKEN_TYPES)) -> Header:
    """Reads the head from `data`, the first bytes of a file of `size` bytes, and of the long arrays those of `whole`.

    Raises NeedsMore where `data` ends too early and the file does not, CheckpointError where the file is no GGUF, is
    cut short, or says what can't be.
    """
    cursor = _Cursor(data, size, file)
    if bytes(data[:4]) != b"GGUF":
        raise CheckpointError(f"{file} is not a GGUF file", "it does not begin with GGUF", "check what it is")
    cursor.offset = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise CheckpointError(f"{file} is GGUF version {version}", hint="convert it to version 3, little-endian")
    tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(pair_count):
        key, kind = cursor.string(), cursor.scalar("I")
        metadata[key] = cursor.value(kind, whole=key in whole)
    metadata_end = cursor.offset
    tokens, token_types = (metadata.pop(key, None) or () for key in (TOKENS, TOKEN_TYPES))
    if not (isinstance(tokens, Sequence) and isinstance(token_types, Sequence)):
        raise cursor.damaged("its vocabulary is no list")
    entries = [cursor.tensor() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged(f"its alignment is {alignment}")
    start = math.ceil(cursor.offset / alignment) * alignment
    tensors = {name: _placed(cursor, name, shape, kind, start + at) for name, shape, kind, at in entries}
    said = {key: value for key, value in metadata.items() if value is not None}
    return Header(said, tensors, metadata_end, tokens, token_types)


def _placed(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
    try:
        tensor_type = GGMLQuantizationType(kind)
    except ValueError as error:
        raise CheckpointError(
            f"{name} in {cursor.file} is of the unknown type {kind}", hint="update the gguf package"
        ) from error
    block, block_bytes = GGML_QUANT_SIZES[tensor_type]
    if not shape or shape[-1] % block:
        raise cursor.damaged(f"{name} is said to be {tensor_type.name} {list(shape)}")
    nbytes = math.prod(shape) // block * block_bytes
    if start + nbytes > cursor.size:
        raise cursor.damaged(f"{name} ends at byte {start + nbytes} and the file at {cursor.size}")
    return StoredTensor(shape, tensor_type, start, nbytes)


class _Cursor:
    """Reads on from `offset`, never past the end."""

    def __init__(self, data: memoryview, size: int, file: str) -> None:
        self._data = data
        self.size = size
        self.file = file
        self.offset = 0

    def damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.file} is damaged or cut short", why, "download it again")

    def scalar(self, form: str) -> Any:
        return self._unpack("<" + form)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        self._require(length)
        start, self.offset = self.offset, self.offset + length
        try:
            return str(self._data[start : self.offset], "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"the text at byte {start} is not UTF-8") from error

    def value(self, kind: int, *, whole: bool) -> Any:
        """A value of the metadata; None for an array that is skipped, which none is if it is asked for `whole`."""
        value_type = self._value_type(kind)
        if value_type is GGUFValueType.STRING:
            return self.string()
        if value_type is GGUFValueType.ARRAY:
            return self._array(whole)
        value = self.scalar(_SCALARS[value_type])
        return _shortest(value) if value_type is GGUFValueType.FLOAT32 else value

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.string(), self.scalar("I")
        self._require(8 * dimensions)
        shape = self._unpack(f"<{dimensions}Q")
        kind, offset = self._unpack("<IQ")
        return name, shape[::-1], kind, offset

    def _array(self, whole: bool) -> Sequence[Any] | None:
        item_type, count = self._value_type(self.scalar("I")), self.scalar("Q")
        if item_type is GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.file} has an array of arrays in its metadata", hint="use another file")
        if item_type is GGUFValueType.STRING:
            return self._strings(count, whole)
        form = _SCALARS[item_type]
        self._require(count * struct.calcsize(f"<{form}"))
        if count > LONGEST_ARRAY and not whole:
            self.offset += count * struct.calcsize(f"<{form}")
            return None
        return self._unpack(f"<{count}{form}")

    def _strings(self, count: int, whole: bool) -> list[bytes] | None:
        length_at, data, offset = struct.Struct("<Q").unpack_from, self._data, self.offset
        strings: list[bytes] = []
        try:
            for _ in range(count):
                start = offset + 8
                offset = start + length_at(data, offset)[0]
                if whole:
                    strings.append(bytes(data[start:offset]))
        except (struct.error, OverflowError):
            offset += 8
        self._require(offset - self.offset)
        self.offset = offset
        return strings if whole else None

    def _value_type(self, kind: int) -> GGUFValueType:
        try:
            return GGUFValueType(kind)
        except ValueError as error:
            raise self.damaged(f"there is a value of the unknown type {kind} before byte {self.offset}") from error

    def _unpack(self, form: str) -> tuple[Any, ...]:
        self._require(struct.calcsize(form))
        values = struct.unpack_from(form, self._data, self.offset)
        self.offset += struct.calcsize(form)
        return values

    def _require(self, nbytes: int) -> None:
        end = self.offset + nbytes
        if end > self.size:
            raise self.damaged(f"its header goes on past its end at byte {self.size}")
        if end > len(self._data):
            raise NeedsMore


def _shortest(value: float) -> float:
    """The shortest decimal that is the same 32-bit number: what the config said before it was converted."""
    return float(str(np.float32(value)))
