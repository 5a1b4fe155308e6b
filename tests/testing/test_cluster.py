"""The kit's own promises: what it starts serves, what it kills is dead, and nothing is left whatever happens."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
import trio

from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster import COORDINATOR, Cluster, open_cluster

SECONDS = 600
pytestmark = pytest.mark.unix


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=2)


async def test_a_cluster_serves_and_after_a_failure_nothing_is_left_but_what_was_printed(model: Path) -> None:
    started: list[Cluster] = []
    with trio.fail_after(SECONDS), pytest.raises(ZeroDivisionError) as failure:
        async with open_cluster(model, local_nodes=1) as cluster:
            started.append(cluster)
            await cluster.wait_ready()
            assert cluster.processes().keys() == {COORDINATOR, "local-1"}
            async with cluster.client() as client:
                body = {"model": cluster.model, "prompt": "Hello", "max_tokens": 3, "temperature": 0}
                answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == 3
            raise ZeroDivisionError
    assert started[0].processes() == {}
    assert "coordinator (ended with 0)" in failure.value.__notes__[0]
    assert "nodes join" in failure.value.__notes__[0]


async def test_a_coordinator_that_does_not_start_is_an_error_with_its_words(tmp_path: Path) -> None:
    before = len(psutil.Process().children(recursive=True))
    with trio.fail_after(SECONDS), pytest.raises(AssertionError, match="does not answer") as failure:
        async with open_cluster(tmp_path / "nothing") as cluster:
            await cluster.programs[0].wait(SECONDS)
            await cluster.wait_ready()
    assert "coordinator (ended with 1)" in failure.value.__notes__[0]
    assert len(psutil.Process().children(recursive=True)) == before


async def test_what_does_not_end_when_asked_is_killed_and_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.testing.cluster.END_SECONDS", 0.5)
    with trio.fail_after(SECONDS), pytest.raises(AssertionError, match=r"had to be killed: \['stuck'\]"):
        async with open_cluster(model) as cluster:
            node = await cluster.start_node("stuck")
            await cluster.wait_until(lambda status: len(status["nodes"]) == 1)
            await cluster.wait_ready()
            psutil.Process(node.process.pid).suspend()
            await cluster.send_signal(COORDINATOR, signal.SIGTERM)
            assert await cluster.programs[0].wait(SECONDS) == 0
    assert cluster.processes() == {}
