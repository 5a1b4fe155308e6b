"""House rules: clients as their users run them, over real HTTP, against a real cluster in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from core.gateway.server import serve_http
from core.gateway.settings import ApiSettings
from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster_in_memory import MemoryCluster, memory_cluster


@dataclass(frozen=True)
class Served:
    """A cluster of two nodes behind its API; `url` ends with /v1."""

    cluster: MemoryCluster
    url: str
    key: str = "a-key-of-this-test"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), endless=True)


@pytest.fixture
async def served(checkpoint: Path, nursery: trio.Nursery) -> AsyncIterator[Served]:
    with trio.fail_after(300):
        async with memory_cluster(checkpoint, "a", "b") as cluster:
            await cluster.ready()
            settings = ApiSettings(keys=frozenset({Served.key}))
            host, port = await nursery.start(serve_http, cluster.coordinator, "127.0.0.1", 0, settings)
            yield Served(cluster, f"http://{host}:{port}/v1")
