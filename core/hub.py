"""One revision of a repository of the Hugging Face hub, for the authors of checkpoint formats.

Files come through huggingface_hub: with its cache, its token and its endpoint, from wherever the user keeps them.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    HfFileMetadata,
    constants,
    get_hf_file_metadata,
    get_session,
    hf_hub_download,
    hf_hub_url,
    hf_raise_for_status,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.errors import HTTPError as NetworkError  # type: ignore[attr-defined]
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import tqdm

from core.errors import CheckpointError, CoreError, MissingFile
from core.interfaces.checkpoint import Progress

LOG_IN = "log in with `hf auth login`"
_INCOMPLETE = "Consistency check failed"
"""Begins what huggingface_hub says, as an OSError, of a file that is shorter than the hub said."""
_KEPT = "core-headers"
"""A folder beside a repository's files, in the hub's own cache."""
SHA256, COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


class Repository:
    """Pinned to the commit that `revision` names when it is opened, so that all files are of one state.

    Opening asks the hub for `anchor`, a file that has to be there; where the hub can't be asked, what is in the cache
    is all that there is. Every method raises CheckpointError in words for people.
    """

    def __init__(self, repo_id: str, anchor: str, revision: str | None, cache_dir: Path | None) -> None:
        self.repo_id = repo_id
        self.cache_dir = cache_dir
        self._anchor = anchor
        self._revision = revision
        self._asked: dict[str, About] = {}
        self.offline = False
        self._kept = KeptParts(repo_id, cache_dir)
        self.commit = self._kept.commit = self._resolve()

    def __str__(self) -> str:
        return f"{self.repo_id} at {self._revision}" if self._revision else self.repo_id

    def has(self, name: str) -> bool:
        if self.cached(name) is not None or (name == self._anchor and not self.offline):
            return True
        if self.offline:
            return self._kept.is_known(name)
        with self.translated(name):
            try:
                self._about(name)
            except EntryNotFoundError:
                return False
        return True

    def names(self) -> list[str]:
        """All its files, in the order of their names; where the hub can't be asked, those that are in the cache."""
        if self.offline:
            return self._cached_names()
        with self.translated(self._anchor):
            return sorted(HfApi().list_repo_files(self.repo_id, revision=self.commit))

    def cached(self, name: str) -> Path | None:
        """The file, where it is in the cache already."""
        return self._cached(name, self.commit)

    def size(self, name: str) -> int:
        """In bytes, asked of the hub where the file isn't cached."""
        cached = self.cached(name)
        if cached is not None:
            return cached.stat().st_size
        with self.translated(name):
            return self._about(name).size

    def sha256(self, name: str) -> str | None:
        """In hexadecimal, as the hub says it of large files; what is in the cache is named by it."""
        cached = self.cached(name)
        if cached is None and self.offline and not self._kept.is_known(name):
            return None
        with self.translated(name):
            tag = cached.resolve().name if cached is not None else self._about(name).etag
        return tag if tag is not None and SHA256.fullmatch(tag) else None

    def path(self, name: str) -> Path:
        """The file on this machine, downloaded where it isn't in the cache."""
        return self._download(name, lambda nbytes: None)

    def fetch(self, names: Collection[str], progress: Progress | None = None) -> None:
        """Downloads what isn't in the cache. `progress` counts the bytes of all `names`, and may be called from a
        thread of the downloader."""
        sizes = {name: self.size(name) for name in names}
        total, done = sum(sizes.values()), 0

        def report(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(min(done, total), total)

        for name, size in sizes.items():
            before = done
            self._download(name, report)
            report(before + size - done)

    def peek(self, name: str, start: int, nbytes: int) -> bytes:
        """Some bytes of a file, fewer where it ends before; the rest isn't downloaded.

        They are kept in the cache, so that a model whose files are on other machines opens without a hub.
        """
        cached = self.cached(name)
        with self.translated(name):
            if cached is not None:
                return _part(cached, start, nbytes)
            part = self._kept.part(name, start, nbytes)
            if part is None and self.offline:
                raise self.missing(name)
            if part is None:
                part = self._part_on_hub(name, start, nbytes)
                self._kept.keep_part(name, start, nbytes, part)
            return part

    def set_aside(self, name: str) -> bool:
        """Renames a cached file whose SHA-256 is not what the hub says; whether it did. It is downloaded again then."""
        cached, stated = self.cached(name), self.sha256(name)
        if cached is None or stated is None or self.offline:
            return False
        with self.translated(name):
            blob = cached.resolve()
            if _sha256(blob) == stated:
                return False
            blob.replace(blob.with_name(f"{blob.name}.damaged"))
            cached.unlink(missing_ok=True)
            return True

    def missing(self, name: str) -> CheckpointError:
        if self.offline:
            return _unreachable(f"{name} of {self}")
        return MissingFile(f"{self} has no {name}", hint="check its name, or use another repository")

    @contextmanager
    def translated(self, name: str) -> Iterator[None]:
        """Says in words for people what goes wrong with the file `name` in calls of huggingface_hub."""
        try:
            yield
        except CoreError:
            raise
        # Beside its own errors, the client lets through those of whichever library moves the bytes.
        except Exception as error:
            raise self._error(name, error) from error

    def _resolve(self) -> str:
        with self.translated(self._anchor):
            try:
                commit = str(self._ask(self._anchor, self._revision).commit_hash)
            except EntryNotFoundError:
                raise
            except Exception:
                cached = self._cached(self._anchor, self._revision)
                known = self._kept.commit_of(self._revision) if cached is None else self._snapshot(cached).name
                if known is None:
                    raise
                self.offline = True
                return known
            self._kept.keep_commit(self._revision, commit)
            return commit

    def _snapshot(self, anchor: Path) -> Path:
        return anchor.parents[self._anchor.count("/")]

    def _cached_names(self) -> list[str]:
        anchor = self.cached(self._anchor)
        if anchor is None:
            return []
        snapshot = self._snapshot(anchor)
        return sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())

    def _cached(self, name: str, revision: str | None) -> Path | None:
        found = try_to_load_from_cache(self.repo_id, name, cache_dir=self.cache_dir, revision=revision)
        return Path(found) if isinstance(found, str) else None

    def _about(self, name: str) -> About:
        """Asked of the hub once: a commit doesn't change."""
        about = self._asked.get(name) or self._kept.about(name)
        if about is None:
            asked = self._ask(name, self.commit)
            about = About(asked.size or 0, asked.etag)
            self._kept.keep_about(name, about)
        self._asked[name] = about
        return about

    def _ask(self, name: str, revision: str | None) -> HfFileMetadata:
        return get_hf_file_metadata(hf_hub_url(self.repo_id, name, revision=revision))

    def _part_on_hub(self, name: str, start: int, nbytes: int) -> bytes:
        url = hf_hub_url(self.repo_id, name, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + nbytes - 1}"}
        received = bytearray()
        with get_session().stream("GET", url, headers=headers) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise CheckpointError(f"{name} of {self} can't be read in parts", hint="download it, and give its path")
            for chunk in response.iter_bytes():
                received += chunk
                if len(received) >= nbytes:
                    break
        return bytes(received[:nbytes])

    def _download(self, name: str, report: Callable[[int], None]) -> Path:
        """The anchor goes by the revision's own name, by which it is then found again in the cache."""
        cached = self.cached(name)
        if cached is not None:
            return cached
        with self.translated(name):
            path = hf_hub_download(
                self.repo_id,
                name,
                revision=self._revision if name == self._anchor else self.commit,
                cache_dir=self.cache_dir,
                local_files_only=self.offline,
                tqdm_class=_bar(report),
            )
        if self.commit not in Path(path).parts:
            raise CheckpointError(f"{self} has changed while it was read", hint="try again")
        return Path(path)

    def _error(self, name: str, error: Exception) -> CheckpointError:
        file = f"{name} of {self}"
        if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
            error = error.__cause__
        match error:
            case GatedRepoError():
                title, why = f"{self} is gated", "its owner decides who may have it"
                hint = f"ask on its page, then {LOG_IN}"
            case RepositoryNotFoundError():
                title, why = f"there is no {self.repo_id}, neither here nor on the hub", "or it is private"
                hint = f"check its name; where it is private, {LOG_IN}"
            case RevisionNotFoundError():
                title, why = f"{self.repo_id} has no revision {self._revision or self.commit}", ""
                hint = "check its name"
            case LocalEntryNotFoundError() | OfflineModeIsEnabled():
                return _unreachable(file)
            case EntryNotFoundError():
                return self.missing(name)
            case HfHubHTTPError() if error.response.status_code in (401, 403):
                title, why, hint = f"the hub refuses {file}", error.server_message or "", LOG_IN
            case HfHubHTTPError() if error.response.status_code == 429:
                after = error.response.headers.get("Retry-After")
                title, why = f"the hub takes no more requests for {file} now", "this address has sent it too many"
                hint = f"try again in {after} s" if after else "try again later"
            case HfHubHTTPError():
                title, why, hint = f"the hub fails on {file}", f"it answers {error.response.status_code}", "try later"
            case NetworkError():
                return _unreachable(file)
            case OSError() if _INCOMPLETE in str(error):
                title, why, hint = f"{file} came incomplete", "the hub sent fewer bytes than it said", "try again"
            case OSError():
                title, why, hint = f"{file} can't be kept in the cache or read from it", str(error), "check the disk"
            case _:
                title, why, hint = f"{file} can't be fetched", f"{type(error).__name__}: {error}", "try again"
        return CheckpointError(title, why, hint)


@dataclass(frozen=True, slots=True)
class About:
    """A file as the hub speaks of it: `etag` is the SHA-256 of a large one."""

    size: int
    etag: str | None


class KeptParts:
    """What was read of a repository's files, at `commit`, without downloading them, kept in the hub's cache.

    A machine that holds a part of a model needs the headers of all its files, and the rest of its own alone. What
    can't be kept, or read again, is asked of the hub again.
    """

    commit = ""

    def __init__(self, repo_id: str, cache_dir: Path | None) -> None:
        cache = cache_dir or Path(constants.HF_HUB_CACHE)
        self._folder = cache / repo_folder_name(repo_id=repo_id, repo_type="model") / _KEPT

    def commit_of(self, revision: str | None) -> str | None:
        """What `revision` was when the hub was asked last."""
        try:
            commit = self._path(revision or "", "commit").read_text(encoding="ascii")
        except (OSError, ValueError):
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def keep_commit(self, revision: str | None, commit: str) -> None:
        self._keep(self._path(revision or "", "commit"), commit.encode())

    def is_known(self, name: str) -> bool:
        return self.about(name) is not None

    def about(self, name: str) -> About | None:
        try:
            said = json.loads(self._path(name, "about").read_bytes())
            return About(int(said["size"]), said["etag"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep_about(self, name: str, about: About) -> None:
        self._keep(self._path(name, "about"), json.dumps(asdict(about)).encode())

    def part(self, name: str, start: int, nbytes: int) -> bytes | None:
        """Checked: it lies on a disk for long."""
        try:
            digest, content = self._path(name, f"{start}-{nbytes}").read_bytes().split(b"\n", 1)
        except (OSError, ValueError):
            return None
        return content if hashlib.sha256(content).hexdigest().encode() == digest else None

    def keep_part(self, name: str, start: int, nbytes: int, content: bytes) -> None:
        digest = hashlib.sha256(content).hexdigest().encode()
        self._keep(self._path(name, f"{start}-{nbytes}"), digest + b"\n" + content)

    def _path(self, name: str, what: str) -> Path:
        return self._folder / self.commit / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.{what}"

    def _keep(self, path: Path, content: bytes) -> None:
        """Whole or not at all."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(content)
            Path(file.name).replace(path)
        except OSError:
            return


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _part(path: Path, start: int, nbytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(nbytes)


def _unreachable(file: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not in the cache", "the hub can't be reached", "connect to the internet, or give a local path"
    )


def _bar(report: Callable[[int], None]) -> type[tqdm]:
    """A progress bar that shows nothing and reports what is written to disk."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            report(int(n or 0))

        def update_transfer(self, n: float) -> None:
            """Bytes on the network, which reach the disk later."""

        def set_transfer_postfix_str(self, *args: Any, **options: Any) -> None:
            """The network's speed."""

    return Bar
