"""The loopback hub serves the real client."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from core.testing.hub import LoopbackHub, loopback_hub

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    for repo in ("org/model", "org/closed"):
        (tmp_path / "hub" / repo / "deep").mkdir(parents=True)
        (tmp_path / "hub" / repo / "weights.bin").write_bytes(CONTENT)
        (tmp_path / "hub" / repo / "deep" / "note.txt").write_text("hello")
    with loopback_hub(tmp_path / "hub", gated=["org/closed"]) as hub:
        yield hub


def test_files_are_downloaded_and_counted(hub: LoopbackHub, tmp_path: Path) -> None:
    options = {"cache_dir": tmp_path / "cache", "endpoint": hub.url}
    assert Path(hf_hub_download("org/model", "weights.bin", **options)).read_bytes() == CONTENT
    assert Path(hf_hub_download("org/model", "deep/note.txt", **options)).read_text() == "hello"
    hf_hub_download("org/model", "weights.bin", **options)
    assert hub.served == {"org/model/weights.bin": len(CONTENT), "org/model/deep/note.txt": 5}


@pytest.mark.parametrize(
    ("wanted", "served"),
    [("bytes=0-9", CONTENT[:10]), ("bytes=255999-300000", CONTENT[-1:]), ("bytes=255000-", CONTENT[255000:])],
)
def test_ranges(hub: LoopbackHub, wanted: str, served: bytes) -> None:
    request = urllib.request.Request(f"{hub.url}/org/model/resolve/main/weights.bin", headers={"Range": wanted})
    with urllib.request.urlopen(request, timeout=300) as response:
        assert (response.status, response.read()) == (206, served)
    assert hub.served["org/model/weights.bin"] == len(served)


def test_a_repository_says_its_state_and_its_files(hub: LoopbackHub) -> None:
    api = HfApi(endpoint=hub.url)
    info = api.model_info("org/model")
    assert [file.rfilename for file in info.siblings] == ["deep/note.txt", "weights.bin"]
    assert api.model_info("org/model", revision=info.sha).sha == info.sha
    assert sorted(api.list_repo_files("org/model")) == ["deep/note.txt", "weights.bin"]


@pytest.mark.parametrize(
    ("repo", "file", "revision", "error"),
    [
        ("org/none", "weights.bin", None, RepositoryNotFoundError),
        ("org/closed", "weights.bin", None, GatedRepoError),
        ("org/model", "none.bin", None, RemoteEntryNotFoundError),
        ("org/model", "weights.bin", "v9", RevisionNotFoundError),
    ],
)
def test_refusals_are_the_hubs_own(
    hub: LoopbackHub, tmp_path: Path, repo: str, file: str, revision: str | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        hf_hub_download(repo, file, revision=revision, cache_dir=tmp_path / "cache", endpoint=hub.url)


def test_nothing_outside_the_directory_is_served(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("no")
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{hub.url}/org/model/resolve/main/..%2F..%2F..%2Fsecret", timeout=300)
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{hub.url}/..%2Forg/model/resolve/main/weights.bin", timeout=300)
