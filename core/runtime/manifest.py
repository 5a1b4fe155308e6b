"""What a checkpoint is, byte for byte: so that a node proves that its copy is the coordinator's before it serves.

The manifest lists a checkpoint's files and tensors with their SHA-256. The coordinator makes it when the model is
open, and an ASSIGNMENT carries what the node has to prove for its own layers:

- config, tokenizer and chat template: those of the files that are on the node's machine; and of each file of weights
  what lies between its tensors (a header; in a GGUF file, config and tokenizer too);
- a digest per layer, of its tensors' digests. The node hashes each tensor when it has just been read for loading, in
  other threads: it reads nothing but its own layers, and nothing twice from the disk;
- of a hub's files that neither side has hashed, the SHA-256 that the hub states. So the coordinator need not have the
  weights. The node hashes such a file whole, and once: it was brought here for the layers that it holds.

A tensor's own digest is in the manifest alone: those of a model with many experts would not fit into an ASSIGNMENT.
Whoever needs to know which tensor differs compares what `core manifest` says on both machines.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from core.interfaces.checkpoint import Checkpoint, Progress, TensorInfo
from core.runtime.digests import FileDigest, digest_file, digest_rest, digest_tensor
from core.runtime.model import Model

HASHING_THREADS = 4
SHA256_OF_NOTHING = hashlib.sha256().hexdigest()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """SHA-256 in hexadecimal: of the file, and of what lies between its tensors.

    `sha256` is None where the file is on a hub alone which does not say it, `rest` where it was not hashed here.
    """

    name: str
    size: int
    sha256: str | None
    rest: str | None


@dataclass(frozen=True, slots=True)
class Proof:
    """What a node has to prove of its copy for a layer range: SHA-256 digests, of 32 bytes each.

    `files` are hashed whole; one that is empty isn't known. `rests` are of what lies between a file's tensors. `layers`
    has one digest per layer of the range, empty where the files are hashed instead that hold it.
    """

    manifest: bytes
    files: Mapping[str, bytes]
    rests: Mapping[str, bytes]
    layers: Sequence[bytes]


class Difference(NamedTuple):
    """What of this machine's copy is not as it should be, in words, and the `files` that it lies in."""

    text: str
    files: tuple[str, ...]


class Manifest:
    """`tensors` has their SHA-256, in hexadecimal, by name: of those whose file was hashed here."""

    def __init__(self, model: Model, files: Iterable[FileEntry], tensors: Mapping[str, str]) -> None:
        self.files = sorted(files, key=lambda file: file.name)
        self.tensors = tensors
        self._model = model

    @classmethod
    def of(cls, model: Model, progress: Progress | None = None) -> Manifest:
        """Hashes what is on this machine and comes from no hub. `progress` counts its bytes.

        Raises CheckpointError for a file that can't be read.
        """
        checkpoint, tensors_in = model.checkpoint, tensors_by_file(model.checkpoint)
        files = checkpoint.files()
        paths = {name: checkpoint.path(name) for name, info in files.items() if info.sha256 is None}
        counter = ByteCounter(sum(files[name].size for name, path in paths.items() if path), progress)
        digests = {name: digest_file(path, tensors_in[name], counter.add) for name, path in paths.items() if path}
        entries = [_entry(name, info.size, info.sha256, digests.get(name)) for name, info in files.items()]
        tensors = {
            name: digests[info.file].tensors[info.offset] if info.nbytes else SHA256_OF_NOTHING
            for name, info in checkpoint.tensors.items()
            if info.file in digests
        }
        return cls(model, entries, tensors)

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of what `sha256sum` prints of the files in the order of their names."""
        lines = [f"{file.sha256}  {file.name}\n" for file in self.files]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def proof(self, layers: range) -> Proof:
        tensors = self._model.checkpoint.tensors
        digests = [layer_digest(self._model, layer, self.tensors) for layer in layers]
        unhashed = [layer for layer, digest in zip(layers, digests, strict=True) if not digest]
        whole = {tensors[name].file for layer in unhashed for name in _names(self._model, layer)}
        weights = {info.file for info in tensors.values()}
        return Proof(
            manifest=bytes.fromhex(self.digest),
            files={
                file.name: bytes.fromhex(file.sha256 or "")
                for file in self.files
                if file.name in whole or file.name not in weights
            },
            rests={file.name: bytes.fromhex(file.rest) for file in self.files if file.rest and file.name in weights},
            layers=digests,
        )

    def as_json(self) -> dict[str, Any]:
        """`offset` and `nbytes` say where in its file a tensor lies; `layer` is None for embedding, norm and head."""
        model = self._model
        layer_of = {name: layer for layer in range(model.spec.layers) for name in _names(model, layer)}
        return {
            "digest": self.digest,
            "revision": model.checkpoint.revision,
            "architecture": model.architecture.name,
            "layers": model.spec.layers,
            "files": [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in self.files],
            "tensors": [
                {
                    "name": name,
                    "layer": layer_of.get(name),
                    "file": info.file,
                    "offset": info.offset,
                    "nbytes": info.nbytes,
                    "shape": list(info.shape),
                    "dtype": info.dtype,
                    "sha256": self.tensors.get(name),
                }
                for name, info in model.checkpoint.tensors.items()
            ],
        }


def layer_digest(model: Model, layer: int, sha256: Mapping[str, str]) -> bytes:
    """Of a layer's tensors: what each is called, how its bytes read, and its `sha256`. Empty where that isn't known."""
    names = _names(model, layer)
    if not all(name in sha256 for name in names):
        return b""
    infos = model.checkpoint.tensors
    lines = [f"{sha256[name]} {infos[name].dtype} {list(infos[name].shape)} {name}\n" for name in sorted(names)]
    return hashlib.sha256("".join(lines).encode()).digest()


def still_to_prove(model: Model, layers: range, proof: Proof, missing: Collection[int]) -> Proof:
    """What of `proof`, which is for `layers`, remains where all but the `missing` ones are held, and proven."""
    tensors = model.checkpoint.tensors
    needed = {tensors[name].file for layer in missing for name in _names(model, layer)}
    held = {info.file for info in tensors.values()} - needed
    return Proof(
        manifest=proof.manifest,
        files={name: digest for name, digest in proof.files.items() if name not in held},
        rests=proof.rests,
        layers=[digest for layer, digest in zip(layers, proof.layers, strict=True) if layer in missing],
    )


def other_file(
    model: Model, layers: Sequence[int], proof: Proof, progress: Progress | None = None
) -> Difference | None:
    """Which file of this machine's copy is not as `proof` says; None if all are.

    The files of `layers` have been fetched. `progress` counts the bytes of those that are hashed whole.
    """
    checkpoint, tensors_in = model.checkpoint, tensors_by_file(model.checkpoint)
    for layer, digest in zip(layers, proof.layers, strict=True):
        for name in () if digest else _names(model, layer):
            if checkpoint.tensors[name].file not in proof.files:
                file = checkpoint.tensors[name].file
                return Difference(f"{name} is in {file}, and on the coordinator it is not", ())
    for file, digest in proof.rests.items():
        path = checkpoint.path(file)
        if path is not None and digest_rest(path, tensors_in[file]) != digest.hex():
            return Difference(f"{file} says other things of its tensors, or beside them", (file,))
    here = {file: path for file, digest in proof.files.items() if digest and (path := checkpoint.path(file))}
    counter = ByteCounter(sum(path.stat().st_size for path in here.values()), progress)
    for file, path in here.items():
        if digest_file(path, tensors_in[file], counter.add).sha256 != proof.files[file].hex():
            return Difference(f"{file} has other bytes", (file,))
    return None


class Prover:
    """Hashes tensors while they are loaded, in as many threads as torch computes with, up to four.

    Those of `layers` against `proof`; or, if it has no digest of a layer, against what they were when their file was
    hashed as a whole, and so `more`. It is one tensor per thread behind the loader at most, so that what it reads is
    still in memory.
    """

    def __init__(self, model: Model, layers: Sequence[int], proof: Proof, more: Iterable[str] = ()) -> None:
        self._model = model
        self._expected = {layer: digest for layer, digest in zip(layers, proof.layers, strict=True) if digest}
        in_layers = {name for layer in self._expected for name in _names(model, layer)}
        self._single = {name for layer in layers if layer not in self._expected for name in _names(model, layer)}
        self._single |= set(more)
        self._wanted = in_layers | self._single
        self._sha256: dict[str, str] = {}
        self._threads = min(torch.get_num_threads(), HASHING_THREADS)
        self._pool = ThreadPoolExecutor(self._threads, "prover")
        self._begun: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def seen(self, name: str) -> None:
        """The tensor has just been read. Raises CheckpointError where one before it can't be read again."""
        if name in self._wanted:
            self._wanted.remove(name)
            self._wait(self._threads - 1)
            self._begun.append(self._pool.submit(self._hash, name))

    def difference(self) -> Difference | None:
        """What of this machine's copy is not as it should be; None if all is."""
        self._wait(0)
        for name in self._wanted:
            self._hash(name)
        tensors = self._model.checkpoint.tensors
        for layer, digest in self._expected.items():
            if layer_digest(self._model, layer, self._sha256) != digest:
                files = sorted({tensors[name].file for name in _names(self._model, layer)})
                return Difference(f"layer {layer}, in {' and '.join(files)}, has other bytes", tuple(files))
        return self._changed()

    def _changed(self) -> Difference | None:
        """What isn't as it was when its file was hashed as a whole."""
        checkpoint, tensors_in = self._model.checkpoint, tensors_by_file(self._model.checkpoint)
        known: dict[str, FileDigest] = {}
        for name in sorted(self._single):
            info = checkpoint.tensors[name]
            if info.file not in known:
                path = checkpoint.path(info.file)
                assert path is not None, "it has just been read"
                known[info.file] = digest_file(path, tensors_in[info.file], lambda _: None)
                if digest_rest(path, tensors_in[info.file]) != known[info.file].rest:
                    return Difference(f"{info.file} has changed on the disk since it was hashed", (info.file,))
            if info.nbytes and known[info.file].tensors[info.offset] != self._sha256[name]:
                return Difference(f"{name}, in {info.file}, has changed on the disk since it was hashed", (info.file,))
        return None

    def _wait(self, begun: int) -> None:
        """Until no more than so many are at work or wait for it."""
        while len(self._begun) > begun:
            self._begun.popleft().result()

    def _hash(self, name: str) -> None:
        info = self._model.checkpoint.tensors[name]
        path = self._model.checkpoint.path(info.file)
        assert path is not None, "it has just been read"
        self._sha256[name] = digest_tensor(path, info)


NOTHING = Proof(b"", {}, {}, ())
"""To prove of no layers."""


def stated_proof(model: Model, names: Iterable[str]) -> Proof:
    """What a hub states of the files that hold `names`: NOTHING of those that come from no hub."""
    files = model.checkpoint.files()
    holding = {model.checkpoint.tensors[name].file for name in names}
    stated = {file: sha256 for file in holding if (sha256 := files[file].sha256) is not None}
    return Proof(b"", {file: bytes.fromhex(sha256) for file, sha256 in stated.items()}, {}, ())


class ByteCounter:
    """Tells `progress` of the bytes of a whole that are done."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _entry(name: str, size: int, stated: str | None, digest: FileDigest | None) -> FileEntry:
    if digest is None:
        return FileEntry(name, size, stated, None)
    return FileEntry(name, size, digest.sha256, digest.rest)


def tensors_by_file(checkpoint: Checkpoint) -> Mapping[str, Sequence[TensorInfo]]:
    by_file: defaultdict[str, list[TensorInfo]] = defaultdict(list)
    for info in checkpoint.tensors.values():
        by_file[info.file].append(info)
    return by_file


def _names(model: Model, layer: int) -> list[str]:
    return model.layer_tensor_names([layer])
