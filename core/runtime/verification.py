"""Whether a checkpoint's files on this machine are still what they should be, read from the disk once more."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from core.interfaces.checkpoint import Progress
from core.runtime.digests import check_file
from core.runtime.manifest import ByteCounter, tensors_by_file
from core.runtime.model import Model


class Verdict(Enum):
    AS_STATED = "ok, as the hub says"
    AS_BEFORE = "ok, as it was hashed first"
    UNKNOWN = "not hashed before"
    ABSENT = "not on this machine"
    DAMAGED = "damaged"


def verify(model: Model, progress: Progress | None = None) -> Mapping[str, Verdict]:
    """By file. `progress` counts the bytes that are hashed. Raises CheckpointError for a file that can't be read."""
    files, tensors = model.checkpoint.files(), tensors_by_file(model.checkpoint)
    here = {name: path for name in files if (path := model.checkpoint.path(name)) is not None}
    counter = ByteCounter(sum(path.stat().st_size for path in here.values()), progress)
    verdicts = dict.fromkeys(files, Verdict.ABSENT)
    for name, path in here.items():
        found, before = check_file(path, tensors.get(name, ()), counter.add)
        verdicts[name] = _verdict(found, files[name].sha256, before)
    return verdicts


def _verdict(found: str, stated: str | None, before: str | None) -> Verdict:
    expected = stated or before
    if expected is None:
        return Verdict.UNKNOWN
    if found != expected:
        return Verdict.DAMAGED
    return Verdict.AS_STATED if stated else Verdict.AS_BEFORE
