"""A repository of the Hugging Face hub, through huggingface_hub: with its cache, its token and its endpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from core import CheckpointError, CoreError, Progress, TensorInfo
from core_plugin_safetensors.header import read_header, tensor_info

LOG_IN = "log in with `hf auth login`"


class Repository:
    """Headers are read from the hub, and weights stay there until they are fetched.

    It is pinned to the commit that `revision` names when it is opened, so that all files are of one state. Opening asks
    for `anchor`, a file that has to be there; where the hub can't be asked, what is in the cache is all that there is.
    """

    def __init__(self, repo_id: str, anchor: str, revision: str | None, cache_dir: Path | None) -> None:
        self._repo_id = repo_id
        self._cache_dir = cache_dir
        self._anchor = anchor
        self._revision = revision
        self._offline = False
        self._commit = self._resolve()

    def __str__(self) -> str:
        return f"{self._repo_id} at {self._revision}" if self._revision else self._repo_id

    def has(self, name: str) -> bool:
        if name == self._anchor or self._cached(name) is not None:
            return True
        if self._offline:
            return False
        with self._translated(name):
            try:
                self._ask(name, self._commit)
            except EntryNotFoundError:
                return False
        return True

    def path(self, name: str) -> Path:
        """The file on this machine, downloaded where it isn't in the cache."""
        return self._download(name, lambda nbytes: None)

    def fetch(self, names: Collection[str], progress: Progress | None = None) -> None:
        """Downloads what isn't in the cache. `progress` counts the bytes of all `names`, and may be called from a
        thread of the downloader."""
        sizes = {name: self._size(name) for name in names}
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

    def header(self, name: str) -> Mapping[str, TensorInfo] | None:
        cached = self._cached(name)
        if cached is not None:
            return read_header(cached)
        if self._offline:
            return None
        with self._translated(name):
            found = HfApi().parse_safetensors_file_metadata(self._repo_id, name, revision=self._commit)
            return {
                tensor: tensor_info(name, tensor, entry.dtype, entry.shape, entry.data_offsets)
                for tensor, entry in found.tensors.items()
            }

    def missing(self, name: str) -> CheckpointError:
        if self._offline:
            return _unreachable(f"{name} of {self}")
        return CheckpointError(f"{self} has no {name}", hint="check its name, or use another repository")

    def pretrained(self) -> dict[str, Any]:
        return {
            "pretrained_model_name_or_path": self._repo_id,
            "revision": self._commit,
            "cache_dir": self._cache_dir,
            "local_files_only": self._offline,
        }

    def _cached(self, name: str) -> Path | None:
        found = try_to_load_from_cache(self._repo_id, name, cache_dir=self._cache_dir, revision=self._commit)
        return Path(found) if isinstance(found, str) else None

    def _size(self, name: str) -> int:
        cached = self._cached(name)
        if cached is not None:
            return cached.stat().st_size
        with self._translated(name):
            return self._ask(name, self._commit).size or 0

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Says in words for people what goes wrong with the file `name` in calls of huggingface_hub."""
        try:
            yield
        except CoreError:
            raise
        # Beside its own errors, the client lets through those of whichever library moves the bytes.
        except Exception as error:
            raise self._error(name, error) from error

    def _resolve(self) -> str:
        with self._translated(self._anchor):
            try:
                return str(self._ask(self._anchor, self._revision).commit_hash)
            except EntryNotFoundError:
                raise
            except Exception:
                cached = try_to_load_from_cache(
                    self._repo_id, self._anchor, cache_dir=self._cache_dir, revision=self._revision
                )
                if not isinstance(cached, str):
                    raise
                self._offline = True
                return Path(cached).parents[self._anchor.count("/")].name

    def _ask(self, name: str, revision: str | None) -> Any:
        return get_hf_file_metadata(hf_hub_url(self._repo_id, name, revision=revision))

    def _download(self, name: str, report: Callable[[int], None]) -> Path:
        """The anchor goes by the revision's own name, by which it is then found again in the cache."""
        with self._translated(name):
            path = hf_hub_download(
                self._repo_id,
                name,
                revision=self._revision if name == self._anchor else self._commit,
                cache_dir=self._cache_dir,
                local_files_only=self._offline,
                tqdm_class=_bar(report),
            )
        if self._commit not in Path(path).parts:
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
                title, why = f"there is no {self._repo_id}, neither here nor on the hub", "or it is private"
                hint = f"check its name; where it is private, {LOG_IN}"
            case RevisionNotFoundError():
                title, why = f"{self._repo_id} has no revision {self._revision or self._commit}", ""
                hint = "check its name"
            case LocalEntryNotFoundError() | OfflineModeIsEnabled():
                return _unreachable(file)
            case EntryNotFoundError():
                return self.missing(name)
            case HfHubHTTPError() if error.response.status_code in (401, 403):
                title, why, hint = f"the hub refuses {file}", error.server_message or "", LOG_IN
            case HfHubHTTPError():
                title, why, hint = f"the hub fails on {file}", f"it answers {error.response.status_code}", "try later"
            case HTTPError():
                return _unreachable(file)
            case SafetensorsParsingError():
                title, why, hint = f"{file} is damaged", str(error), "use another repository, or tell its owner"
            case OSError():
                title, why, hint = f"{file} can't be kept in the cache", str(error), "check the disk"
            case _:
                title, why, hint = f"{file} can't be fetched", f"{type(error).__name__}: {error}", "try again"
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
