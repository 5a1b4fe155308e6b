"""A repository of a hub, as the authors of checkpoint formats use it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from core.errors import CheckpointError
from core.hub import Repository
from core.testing.hub import LoopbackHub, loopback_hub

WEIGHTS = bytes(range(256)) * 1000


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does for a process that starts with it."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    files = tmp_path / "hub/org/model"
    files.mkdir(parents=True)
    (files / "config").write_text("seven")
    (files / "weights").write_bytes(WEIGHTS)
    with loopback_hub(tmp_path / "hub") as hub:
        point_at(hub.url, monkeypatch)
        yield hub


def opened(tmp_path: Path) -> Repository:
    return Repository("org/model", "config", None, tmp_path / "cache")


def test_a_part_of_a_file_comes_alone(hub: LoopbackHub, tmp_path: Path) -> None:
    repository = opened(tmp_path)
    assert repository.peek("weights", 100, 8) == WEIGHTS[100:108]
    assert repository.peek("weights", len(WEIGHTS) - 3, 8) == WEIGHTS[-3:]
    assert hub.served["org/model/weights"] == 11
    assert repository.cached("weights") is None


def test_what_is_fetched_is_not_asked_of_the_hub_again(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = opened(tmp_path)
    repository.fetch(["config", "weights"])
    point_at("http://127.0.0.1:9", monkeypatch)
    assert repository.path("config").read_text() == "seven"
    assert repository.path("weights").read_bytes() == WEIGHTS
    assert repository.peek("weights", 100, 8) == WEIGHTS[100:108]
    assert repository.size("weights") == len(WEIGHTS)
    assert repository.has("weights")


def test_what_is_fetched_serves_on_after_the_repository_has_changed(hub: LoopbackHub, tmp_path: Path) -> None:
    repository = opened(tmp_path)
    repository.fetch(["config"])
    os.utime(tmp_path / "hub/org/model/config", (1, 1))
    assert repository.path("config").read_text() == "seven"


def test_the_size_is_known_without_the_file(hub: LoopbackHub, tmp_path: Path) -> None:
    repository = opened(tmp_path)
    assert repository.size("weights") == len(WEIGHTS)
    assert hub.served["org/model/weights"] == 0


def test_a_file_that_is_not_there(hub: LoopbackHub, tmp_path: Path) -> None:
    repository = opened(tmp_path)
    assert not repository.has("other")
    for ask in (repository.size, repository.path, lambda name: repository.peek(name, 0, 1)):
        with pytest.raises(CheckpointError, match="org/model has no other"):
            ask("other")


def test_a_hub_that_goes_away(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = opened(tmp_path)
    point_at("http://127.0.0.1:9", monkeypatch)
    for ask in (repository.size, repository.path, lambda name: repository.peek(name, 0, 1)):
        with pytest.raises(CheckpointError, match=r"weights of org/model is not in the cache.*hub can't be reached"):
            ask("weights")


def test_a_cache_that_cannot_be_written(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a directory should be")
    with pytest.raises(CheckpointError, match=r"weights of org/model can't be kept in the cache.*check the disk"):
        opened(tmp_path).path("weights")
