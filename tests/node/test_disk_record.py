"""What a machine has read before, and still has the files of."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from core.node.disk_record import MIN_READ_BYTES, DiskRecord
from core.protocol.fields import OnDisk, Span
from core.runtime import kept_file
from core.testing.checkpoints import tiny_checkpoint
from core.testing.lone_node import lone_node, shard_of

SECONDS = 300
ONE, OTHER = bytes(32), bytes(range(32))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("a", "b")]
    for path in made:
        path.write_bytes(b"12345")
    return made


def looked(path: Path) -> list[OnDisk]:
    """What a process that starts now tells."""
    record = DiskRecord(path)
    record.look()
    return record.told


def test_layers_whose_files_are_there_are_told_in_a_later_run(tmp_path: Path, files: list[Path]) -> None:
    path, (a, b) = tmp_path / "cache" / "on_disk.json", files
    DiskRecord(path).note(ONE, {0: [a], 1: [a, b]}, 10, 1.0)
    DiskRecord(path).note(ONE, {4: [b]}, 10, 1.0)
    DiskRecord(path).note(OTHER, {2: [a]}, 10, 1.0)
    assert looked(path) == [OnDisk(ONE, [Span(0, 2), Span(4, 5)]), OnDisk(OTHER, [Span(2, 3)])]
    b.unlink()
    assert looked(path) == [OnDisk(ONE, [Span(0, 1)]), OnDisk(OTHER, [Span(2, 3)])]
    a.write_bytes(b"cut")
    assert looked(path) == []


def test_how_fast_layers_come_from_there_is_an_average_of_large_reads(tmp_path: Path, files: list[Path]) -> None:
    record = DiskRecord(tmp_path / "on_disk.json")
    record.note(ONE, {0: files}, 1000, 1.0)
    assert record.speed == 0
    record.note(ONE, {0: files}, MIN_READ_BYTES, 1.0)
    record.note(ONE, {0: files}, 3 * MIN_READ_BYTES, 1.0)
    assert record.speed == 2 * MIN_READ_BYTES


@pytest.mark.parametrize("content", [b"", b"[]", b'{"copies": 3}'])
def test_of_a_damaged_file_nothing_is_known(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "on_disk.json").write_bytes(content)
    assert looked(tmp_path / "on_disk.json") == []


async def test_a_node_says_what_it_has_read_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_file, "user_cache_path", lambda name: tmp_path / "cache")
    model = tiny_checkpoint(tmp_path / "model", layers=3)
    shard = shard_of(model, range(1, 3))
    with trio.fail_after(SECONDS):
        async with lone_node(labels=("attic", "gpu")) as node:
            coordinator = await node.met()
            assert coordinator.hello.on_disk == []
            assert coordinator.hello.labels == ["attic", "gpu"]
            await coordinator.assign(1, shard)
            assert coordinator.heard[-2].on_disk == [OnDisk(shard.proof.manifest, [Span(1, 3)])]  # type: ignore[attr-defined]
        async with lone_node() as node:
            assert (await node.met()).hello.on_disk == [OnDisk(shard.proof.manifest, [Span(1, 3)])]
