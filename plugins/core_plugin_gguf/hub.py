"""A file of the Hugging Face hub, through huggingface_hub: with its cache, its token and its endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    tqdm,
)

from core import CheckpointError, CoreError, Progress

LOG_IN = "log in with `hf auth login`"


class HubFile:
    """Its head is read from the hub, and the rest stays there until it is brought.

    It is pinned to the commit that `revision` names when it is opened. Where the hub can't be asked, the cache's copy
    serves.
    """

    def __init__(self, repo_id: str, name: str, revision: str | None, cache_dir: Path | None) -> None:
        self.name = name
        self._repo_id = repo_id
        self._cache_dir = cache_dir
        self._revision = revision
        self._offline = False
        self._size = 0
        self._commit = self._resolve()

    def __str__(self) -> str:
        at = f" at {self._revision}" if self._revision else ""
        return f"{self.name} of {self._repo_id}{at}"

    def size(self) -> int:
        return self._size

    def peek(self, start: int, nbytes: int) -> bytes:
        cached = self._cached(self._commit)
        if cached is not None:
            with cached.open("rb") as file:
                file.seek(start)
                return file.read(nbytes)
        url = hf_hub_url(self._repo_id, self.name, revision=self._commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + nbytes - 1}"}
        received = bytearray()
        with self._translated(), get_session().stream("GET", url, headers=headers) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise CheckpointError(f"{self} can't be read in parts", hint="download it, and give its path")
            for chunk in response.iter_bytes():
                received += chunk
                if len(received) >= nbytes:
                    break
        return bytes(received[:nbytes])

    def bring(self, progress: Progress | None = None) -> Path:
        done = 0

        def report(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(min(done, self._size), self._size)

        path = self._cached(self._commit) or self._download(report)
        report(self._size - done)
        return path

    def _download(self, report: Callable[[int], None]) -> Path:
        with self._translated():
            path = hf_hub_download(
                self._repo_id,
                self.name,
                revision=self._revision,
                cache_dir=self._cache_dir,
                local_files_only=self._offline,
                tqdm_class=_bar(report),
            )
        if self._commit not in Path(path).parts:
            raise CheckpointError(f"{self} has changed while it was read", hint="try again")
        return Path(path)

    def _resolve(self) -> str:
        """The commit. The revision's own name goes with each download, so that the cache can find it by that."""
        with self._translated():
            try:
                found = get_hf_file_metadata(hf_hub_url(self._repo_id, self.name, revision=self._revision))
            except EntryNotFoundError:
                raise
            except Exception:
                cached = self._cached(self._revision)
                if cached is None:
                    raise
                self._offline = True
                self._size = cached.stat().st_size
                return cached.parents[self.name.count("/")].name
        self._size = found.size or 0
        return str(found.commit_hash)

    def _cached(self, revision: str | None) -> Path | None:
        found = try_to_load_from_cache(self._repo_id, self.name, cache_dir=self._cache_dir, revision=revision)
        return Path(found) if isinstance(found, str) else None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Says in words for people what goes wrong in calls of huggingface_hub."""
        try:
            yield
        except CoreError:
            raise
        # Beside its own errors, the client lets through those of whichever library moves the bytes.
        except Exception as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> CheckpointError:
        if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
            error = error.__cause__
        match error:
            case GatedRepoError():
                title, why = f"{self._repo_id} is gated", "its owner decides who may have it"
                hint = f"ask on its page, then {LOG_IN}"
            case RepositoryNotFoundError():
                title, why = f"there is no {self._repo_id}, neither here nor on the hub", "or it is private"
                hint = f"check its name; where it is private, {LOG_IN}"
            case RevisionNotFoundError():
                title, why = f"{self._repo_id} has no revision {self._revision}", ""
                hint = "check its name"
            case LocalEntryNotFoundError() | OfflineModeIsEnabled():
                return _unreachable(str(self))
            case EntryNotFoundError():
                title, why, hint = f"{self._repo_id} has no {self.name}", "", "check its name"
            case HfHubHTTPError() if error.response.status_code in (401, 403):
                title, why, hint = f"the hub refuses {self}", error.server_message or "", LOG_IN
            case HfHubHTTPError():
                title, why, hint = f"the hub fails on {self}", f"it answers {error.response.status_code}", "try later"
            case HTTPError():
                return _unreachable(str(self))
            case OSError():
                title, why, hint = f"{self} can't be kept in the cache", str(error), "check the disk"
            case _:
                title, why, hint = f"{self} can't be fetched", f"{type(error).__name__}: {error}", "try again"
        return CheckpointError(title, why, hint)


def _unreachable(file: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not in the cache", "and the hub can't be reached", "connect to the internet, or give a local path"
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
