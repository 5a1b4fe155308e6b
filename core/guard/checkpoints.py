"""What checkpoint formats promise, and the checkpoints that they open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.guard.calls import Call, Guard, is_excused, must_be, shown
from core.interfaces.checkpoint import Checkpoint, FileInfo, TensorInfo
from core.interfaces.stored import StoredWeight


def check_checkpoint(guard: Guard, call: Call, given: Any) -> Checkpoint:
    """Guards it as well."""
    if not isinstance(given, Checkpoint):
        raise call.gave(shown(given), "a Checkpoint")
    for name in ("config", "generation_config", "tensors"):
        value = getattr(given, name, None)
        if not isinstance(value, Mapping):
            raise call.gave(f"a Checkpoint whose {name} is {shown(value)}", "one that has a mapping there")
    odd = next((name for name, info in given.tensors.items() if not isinstance(info, TensorInfo)), None)
    if odd is not None:
        raise call.gave(f"a Checkpoint with {shown(given.tensors[odd])} for the tensor {odd!r}", "a TensorInfo there")
    guard.watch(given, "files", _check_files)
    guard.watch(given, "path", must_be((Path, type(None)), "a Path, or None"))
    guard.watch(given, "fetch", must_be(type(None), "nothing"))
    guard.watch(given, "read", _tensor_check(given.tensors))
    guard.watch(given, "slices", _watched_slices)
    guard.watch(given, "stored", must_be(StoredWeight, "a StoredWeight"))
    guard.watch(given, "stored_slices", _watched_slices)
    guard.watch(given, "set_aside", must_be(bool, "True or False"))
    guard.watch(given, "tokenizer", must_be(object, "a tokenizer"))
    guard.watch(given, "close", must_be(type(None), "nothing"))
    return given


def _check_files(call: Call, given: Any) -> Any:
    if not isinstance(given, Mapping) or not all(isinstance(info, FileInfo) for info in given.values()):
        raise call.gave(shown(given), "a FileInfo for each file")
    return given


def _tensor_check(tensors: Mapping[str, TensorInfo]) -> Any:
    def check(call: Call, given: Any) -> Any:
        import torch

        info = tensors.get(call.args[0])
        right = isinstance(given, torch.Tensor) and given.is_floating_point()
        if not right or (info is not None and tuple(given.shape) != tuple(info.shape)):
            wanted = "a tensor" if info is None else f"one of shape {list(info.shape)}, as its index says,"
            raise call.gave(shown(given), f"{wanted} in a floating-point dtype")
        return given

    return check


def _watched_slices(call: Call, given: Any) -> Iterator[Any]:
    try:
        yield from given
    except Exception as error:
        if is_excused(error):
            raise
        raise call.raised(error) from error
