"""The header of a safetensors file (https://huggingface.co/docs/safetensors/index#format), distrusted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from operator import index
from pathlib import Path
from typing import Any

from core import CheckpointError, TensorInfo

LARGEST_HEADER = 100_000_000
"""Bytes; the format's own bound."""

FIRST_LOOK = 100_000
"""Bytes: the header of most files."""

_SIZES = dict.fromkeys(("F64", "I64", "U64"), 8)
_SIZES |= dict.fromkeys(("F32", "I32", "U32"), 4)
_SIZES |= dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
_SIZES |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1)
"""Bytes per value. A type that isn't here is taken at its word."""


def read_local_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a local file. Raises CheckpointError as `read_header` does."""
    try:
        with path.open("rb") as file:

            def peek(start: int, nbytes: int) -> bytes:
                file.seek(start)
                return file.read(nbytes)

            return read_header(path.name, path.stat().st_size, peek)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read", str(error)) from error


def read_header(file: str, size: int, peek: Callable[[int, int], bytes]) -> dict[str, TensorInfo]:
    """The tensors of a file of `size` bytes, from its header alone; `peek` reads so many bytes from a place on.

    Raises CheckpointError where header and size disagree.
    """
    head = peek(0, FIRST_LOOK)
    end = 8 + int.from_bytes(head[:8], "little")
    if size < 8 or end > 8 + LARGEST_HEADER or end > size:
        raise damaged(file, f"its header says {end - 8} bytes and the file has {size}")
    if end > len(head):
        head += peek(len(head), end - len(head))
    try:
        entries = json.loads(head[8:end])
    except (ValueError, RecursionError) as error:
        raise damaged(file, "its header is not JSON") from error
    if not isinstance(entries, dict):
        raise damaged(file, "its header is no table of tensors")
    entries.pop("__metadata__", None)
    tensors = {name: _entry(file, name, entry, end) for name, entry in entries.items()}
    check_extents(file, tensors.values(), size - end)
    for name, tensor in tensors.items():
        if tensor.offset + tensor.nbytes > size:
            raise damaged(file, f"{name} is said to lie behind its end")
    return tensors


def _entry(file: str, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        return tensor_info(file, name, entry["dtype"], entry["shape"], entry["data_offsets"], data_start)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(file, f"its header's entry for {name} makes no sense") from error


def tensor_info(
    file: str, name: str, dtype: str, shape: Iterable[int], extent: Iterable[int], data_start: int
) -> TensorInfo:
    """One entry of a header, checked in itself: the bytes between its offsets are those that its shape takes.

    `data_start` is where the header ends, from which offsets count.
    """
    dimensions = tuple(map(index, shape))
    start, end = map(index, extent)
    nbytes = end - start
    expected = math.prod(dimensions) * _SIZES.get(dtype, 0)
    if min(dimensions, default=0) < 0 or start < 0 or nbytes < 0 or (expected and expected != nbytes):
        raise damaged(file, f"{name} is said to be {dtype} {list(dimensions)} in {nbytes} bytes")
    return TensorInfo(dimensions, dtype, nbytes, file, data_start + start)


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
    except (ValueError, RecursionError) as error:
        raise damaged(path.name, "it is not JSON") from error
    if not isinstance(content, dict):
        raise damaged(path.name, "it is no JSON object")
    return content
