"""A hub that breaks off, is busy, or sends less than it said: each ends well, or in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from core_plugin_safetensors.checkpoint import SafetensorsFormat
from huggingface_hub import constants

from core import Checkpoint, CheckpointError, Source
from core.testing.checkpoints import tiny_checkpoint
from core.testing.hub import LoopbackHub, loopback_hub

REPO = "org/model"
FILE = f"{REPO}/model.safetensors"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long the client would have waited between its attempts; it doesn't."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Iterator[LoopbackHub]:
    tiny_checkpoint(tmp_path / "hub" / REPO, hidden_size=128, layers=4)
    with loopback_hub(tmp_path / "hub") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 64 << 10)  # 10 MiB, of which a cut loses what is begun
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def opened(tmp_path: Path) -> Checkpoint:
    return SafetensorsFormat().open(Source(REPO, cache_dir=tmp_path / "cache"))


def whole(tmp_path: Path) -> Path:
    return tmp_path / "hub" / FILE


def check_same(checkpoint: Checkpoint, tmp_path: Path) -> None:
    local = SafetensorsFormat().open(Source(str(tmp_path / "hub" / REPO)))
    for name in local.tensors:
        assert torch.equal(checkpoint.read(name), local.read(name)), name


@pytest.mark.parametrize("cuts", [1, 4])
def test_a_download_that_breaks_off_goes_on_where_it_was(hub: LoopbackHub, tmp_path: Path, cuts: int) -> None:
    checkpoint = opened(tmp_path)
    hub.served.clear()
    hub.cuts, hub.cut_after = cuts, 128 << 10
    checkpoint.fetch(list(checkpoint.tensors))
    assert hub.cuts == 0
    assert hub.served[FILE] == whole(tmp_path).stat().st_size, "no byte came twice"
    check_same(checkpoint, tmp_path)


def test_a_busy_hub_is_asked_again_when_it_says(hub: LoopbackHub, tmp_path: Path, waits: list[float]) -> None:
    checkpoint = opened(tmp_path)
    hub.busy, hub.retry_after = 2, 7
    checkpoint.fetch(list(checkpoint.tensors))
    assert hub.busy == 0
    assert max(waits) >= 7
    check_same(checkpoint, tmp_path)


def test_a_hub_that_stays_busy_is_named_with_when_to_come_again(hub: LoopbackHub, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    hub.busy, hub.retry_after = 1000, 30
    with pytest.raises(CheckpointError, match=r"takes no more requests for model.safetensors .*try again in 30 s"):
        checkpoint.fetch(list(checkpoint.tensors))


def test_a_file_that_is_shorter_than_the_hub_said_is_not_kept(hub: LoopbackHub, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    hub.withheld = 1000
    with pytest.raises(CheckpointError, match=r"model.safetensors of org/model came incomplete.*try again"):
        checkpoint.fetch(list(checkpoint.tensors))
    hub.withheld = 0
    checkpoint.fetch(list(checkpoint.tensors))
    check_same(checkpoint, tmp_path)


def test_progress_goes_on_over_a_cut(hub: LoopbackHub, tmp_path: Path) -> None:
    checkpoint, told = opened(tmp_path), list[tuple[int, int]]()
    hub.cuts = 1

    def note(done: int, total: int) -> Any:
        told.append((done, total))

    checkpoint.fetch(list(checkpoint.tensors), note)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] == whole(tmp_path).stat().st_size
