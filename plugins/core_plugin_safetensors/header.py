"""The header of a safetensors file (https://huggingface.co/docs/safetensors/index#format), distrusted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core import CheckpointError, TensorInfo

LARGEST_HEADER = 100_000_000
"""Bytes; the format's own bound."""

_SIZES = dict.fromkeys(("F64", "I64", "U64"), 8)
_SIZES |= dict.fromkeys(("F32", "I32", "U32"), 4)
_SIZES |= dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
_SIZES |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1)
"""Bytes per value. A type that isn't here is taken at its word."""


@dataclass(frozen=True, slots=True)
class StoredTensor(TensorInfo):
    """A tensor of a local file: its bytes begin at `start`."""

    start: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a local file, from its header alone. Raises CheckpointError where the two disagree."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > LARGEST_HEADER or 8 + length > size:
                raise damaged(path.name, f"its header says {length} bytes and the file has {size}")
            entries = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read", str(error)) from error
    except ValueError as error:
        raise damaged(path.name, "its header is not JSON") from error
    if not isinstance(entries, dict):
        raise damaged(path.name, "its header is no table of tensors")
    entries.pop("__metadata__", None)
    tensors = {name: _entry(path.name, name, entry, 8 + length) for name, entry in entries.items()}
    check_extents(path.name, tensors.values(), size - 8 - length)
    for name, tensor in tensors.items():
        if tensor.start + tensor.nbytes > size:
            raise damaged(path.name, f"{name} is said to lie behind its end")
    return tensors


def _entry(file: str, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        info = tensor_info(file, name, entry["dtype"], entry["shape"], entry["data_offsets"])
        return StoredTensor(info.shape, info.dtype, info.nbytes, file, data_start + entry["data_offsets"][0])
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(file, f"its header's entry for {name} makes no sense") from error


def tensor_info(file: str, name: str, dtype: str, shape: Iterable[int], extent: Iterable[int]) -> TensorInfo:
    """One entry of a header, checked in itself: the bytes between its offsets are those that its shape takes."""
    dimensions = tuple(int(size) for size in shape)
    start, end = extent
    nbytes = end - start
    expected = math.prod(dimensions) * _SIZES.get(dtype, 0)
    if min(dimensions, default=0) < 0 or start < 0 or nbytes < 0 or (expected and expected != nbytes):
        raise damaged(file, f"{name} is said to be {dtype} {list(dimensions)} in {nbytes} bytes")
    return TensorInfo(dimensions, dtype, nbytes, file)


def check_extents(file: str, tensors: Iterable[TensorInfo], data: int) -> None:
    """Raises CheckpointError unless the tensors take all of the `data` bytes behind the header."""
    wanted = sum(tensor.nbytes for tensor in tensors)
    if wanted != data:
        raise damaged(file, f"its tensors take {wanted} bytes and {data} are there")


def damaged(file: str, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged or cut short", why, "download it again")


def read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read", str(error)) from error
    except ValueError as error:
        raise damaged(path.name, "it is not JSON") from error
    if not isinstance(content, dict):
        raise damaged(path.name, "it is no JSON object")
    return content
