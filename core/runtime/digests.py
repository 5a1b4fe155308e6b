"""SHA-256 of a checkpoint's files and of the tensors in them. What is large is hashed once, and remembered.

A file is taken for the one that was hashed while its path, size and time of change are the same.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from platformdirs import user_cache_path

from core.errors import CheckpointError
from core.interfaces.checkpoint import TensorInfo

CHUNK_BYTES = 1 << 20
REMEMBERED_BYTES = 16 << 20
"""A smaller file is hashed within milliseconds, again and again."""

Advance = Callable[[int], None]
"""Called with the number of bytes that were hashed since it was called last."""
Extent = tuple[int, int]
"""Where bytes begin, and how many they are."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    """SHA-256, in hexadecimal, of a file; of each tensor in it, by offset; and of all that lies between tensors."""

    sha256: str
    rest: str
    tensors: dict[int, str]


def digest_file(path: Path, tensors: Iterable[TensorInfo], advance: Advance) -> FileDigest:
    """Raises CheckpointError for a file that can't be read, or changes meanwhile, and for tensors that overlap."""
    extents = _extents(tensors)
    try:
        state = _State.of(path)
        known = state.recall()
        if known is not None and known.tensors.keys() == {offset for offset, _ in extents}:
            advance(state.size)
            return known
        digest = _digest(path, extents, state.size, advance)
        if _State.of(path) != state:
            raise CheckpointError(f"{path} changed while it was read", hint="try again")
    except OSError as error:
        raise CheckpointError(f"{path} can't be read", str(error)) from error
    state.remember(digest)
    return digest


def check_file(path: Path, tensors: Iterable[TensorInfo], advance: Advance) -> tuple[str, str | None]:
    """SHA-256, in hexadecimal, of a file as it is now, and as it was hashed first: None if that isn't remembered.

    Raises CheckpointError for a file that can't be read.
    """
    try:
        state = _State.of(path)
        known = state.recall()
        return _digest(path, _extents(tensors), state.size, advance).sha256, known.sha256 if known else None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read", str(error)) from error


def digest_tensor(path: Path, tensor: TensorInfo) -> str:
    """SHA-256 in hexadecimal. Of a tensor that was just read, it takes no second read from the disk."""
    return _sha256(path, [(tensor.offset, tensor.nbytes)])


def digest_rest(path: Path, tensors: Iterable[TensorInfo]) -> str:
    """SHA-256 in hexadecimal of what lies between `tensors`: a header, with whatever it says beside them."""
    return _sha256(path, _gaps(_extents(tensors), path.stat().st_size))


def _extents(tensors: Iterable[TensorInfo]) -> list[Extent]:
    return sorted({(tensor.offset, tensor.nbytes) for tensor in tensors if tensor.nbytes})


def _gaps(extents: Iterable[Extent], size: int) -> Iterator[Extent]:
    """What lies between `extents`, which are sorted. Raises CheckpointError where they overlap."""
    end = 0
    for offset, nbytes in (*extents, (size, 0)):
        if offset < end:
            raise CheckpointError(f"two tensors lie at byte {offset}", hint="the file is damaged: download it again")
        if offset > end:
            yield end, offset - end
        end = offset + nbytes


def _digest(path: Path, extents: list[Extent], size: int, advance: Advance) -> FileDigest:
    whole, rest = hashlib.sha256(), hashlib.sha256()
    tensors = {offset: hashlib.sha256() for offset, _ in extents}
    with path.open("rb", buffering=0) as file:
        for offset, nbytes in sorted([*extents, *_gaps(extents, size)]):
            part = tensors.get(offset, rest)
            for chunk in _chunks(file, offset, nbytes):
                whole.update(chunk)
                part.update(chunk)
                advance(len(chunk))
    return FileDigest(
        whole.hexdigest(), rest.hexdigest(), {offset: part.hexdigest() for offset, part in tensors.items()}
    )


def _sha256(path: Path, extents: Iterable[Extent]) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            for offset, nbytes in extents:
                for chunk in _chunks(file, offset, nbytes):
                    digest.update(chunk)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read", str(error)) from error
    return digest.hexdigest()


def _chunks(file: BinaryIO, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Each is valid until the next one is asked for."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, nbytes)))
    file.seek(offset)
    while nbytes:
        done = file.readinto(buffer[:nbytes])  # type: ignore[attr-defined]
        if not done:
            raise CheckpointError(f"{file.name} was cut short while it was read", hint="download it again")
        nbytes -= done
        yield buffer[:done]


class _Entry(msgspec.Struct):
    """What the cache has of a file."""

    path: str
    size: int
    mtime_ns: int
    digest: FileDigest


@dataclass(frozen=True, slots=True)
class _State:
    """A file as it is now."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> _State:
        status = path.stat()
        return cls(path.resolve(), status.st_size, status.st_mtime_ns)

    def recall(self) -> FileDigest | None:
        try:
            entry = msgspec.json.decode(self._entry.read_bytes(), type=_Entry)
        except (OSError, ValueError):
            return None
        same = (entry.path, entry.size, entry.mtime_ns) == (str(self.path), self.size, self.mtime_ns)
        return entry.digest if same else None

    def remember(self, digest: FileDigest) -> None:
        """Whole or not at all; where it can't be kept, the file is hashed again next time."""
        if self.size < REMEMBERED_BYTES:
            return
        entry = _Entry(str(self.path), self.size, self.mtime_ns, digest)
        try:
            self._entry.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._entry.parent, delete=False) as file:
                file.write(msgspec.json.encode(entry))
            Path(file.name).replace(self._entry)
        except OSError:
            return

    @property
    def _entry(self) -> Path:
        name = hashlib.sha256(str(self.path).encode()).hexdigest()[:32]
        return user_cache_path("core") / "digests" / f"{name}.json"
