"""Dozens of sessions at once with all that can befall them, by the seed: each text is as if it had been alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from core.errors import NotReady, RouteError
from core.interfaces.engine import GenerationRequest
from core.runtime.stage import Stage
from core.testing.cluster_in_memory import MemoryCluster, memory_cluster

SECONDS = 900
SESSIONS = 36
LONGEST = 150
STAGE_BYTES = 443_904
"""Of three of the tiny model's six layers."""
KV_BYTES = 768
"""Of one token in three layers."""
KV_TOKENS = 1280


@dataclass
class Crowd:
    """Prompts of a few families that begin alike, who asks for how much of what follows, and who leaves early."""

    seed: int
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    bounded: list[bool] = field(default_factory=list)
    leaves_after: list[int | None] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        families = [tuple(draw.randrange(20, 250) for _ in range(LONGEST)) for _ in range(3)]
        for _ in range(SESSIONS):
            family = draw.choice(families)
            own = tuple(draw.randrange(20, 250) for _ in range(draw.randrange(1, 30)))
            self.prompts.append((*family[: draw.randrange(20, LONGEST)], *own))
            self.lengths.append(draw.choice([0, 1, 8, 20, 60]))
            self.bounded.append(draw.random() < 0.8)
            self.leaves_after.append(draw.randrange(0, 6) if draw.random() < 0.25 else None)
        self._draw = draw

    def request(self, index: int) -> GenerationRequest:
        """Those without a bound leave by themselves when they have read enough."""
        bound = self.lengths[index] if self.bounded[index] else None
        return GenerationRequest(self.prompts[index], max_tokens=bound, temperature=0, client=str(index % 4))

    async def come(self, cluster: MemoryCluster) -> None:
        async with trio.open_nursery() as nursery:
            for index in range(SESSIONS):
                nursery.start_soon(self._generate, cluster, index)
                for _ in range(self._draw.randrange(0, 4)):
                    await trio.lowlevel.checkpoint()

    async def _generate(self, cluster: MemoryCluster, index: int) -> None:
        text, steps, finished = "", 0, False
        try:
            async with cluster.coordinator.generate(self.request(index)) as generation:
                async for delta in generation:
                    if self.leaves_after[index] == steps:
                        break
                    text, steps, finished = text + delta.text, steps + 1, delta.finish_reason is not None
                    if not self.bounded[index] and delta.tokens >= self.lengths[index]:
                        break
        except (RouteError, NotReady):
            return
        if finished:
            self.texts[index] = text


async def alone(model: Path, crowd: Crowd) -> dict[int, str]:
    """What each makes when nothing else runs, with everything off."""
    options = {"speculation": False, "prefix_cache": False, "max_sessions": 1, "answer_tokens": 40, "max_chunk": 48}
    async with memory_cluster(model, "a", **options) as cluster:
        await cluster.ready()
        texts = {}
        for index, prompt in enumerate(crowd.prompts):
            if crowd.bounded[index] and crowd.leaves_after[index] is None:
                texts[index] = await cluster.text(prompt, crowd.lengths[index])
        return texts


@pytest.mark.parametrize(("seed", "event"), [(1, ""), (2, ""), (3, "dies"), (4, "pauses")])
async def test_a_crowd_is_served_as_if_each_were_alone(
    model: Path, seed: int, event: str, inside: Any, stages: list[Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.coordinator.speculation.Speculation._pays", lambda _: True)
    crowd = Crowd(seed)
    with trio.fail_after(SECONDS):
        expected = await alone(model, crowd)
        stages.clear()
        async with memory_cluster(model, min_nodes=2, rebalance=True, answer_tokens=40, max_chunk=48) as cluster:
            for node_id in ("a", "b"):
                await cluster.start_node(node_id, max_memory=STAGE_BYTES + KV_TOKENS * KV_BYTES)
            await cluster.ready()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(crowd.come, cluster)
                if event:
                    await cluster.until(lambda _: len(crowd.texts) >= 6)
                    await befall(cluster, event)
            if event:
                await cluster.ready(after_epoch=1)
                await crowd.come(cluster)
            assert {index: crowd.texts.get(index) for index in expected} == expected
            await nothing_but_what_is_kept(cluster, inside(cluster), stages)


async def befall(cluster: MemoryCluster, event: str) -> None:
    """A node is killed and started anew, or pauses, and resumes when it is out of the route."""
    if event == "dies":
        cluster.stop_node("b")
        await cluster.until(lambda status: len(status.nodes) == 1)
        await cluster.start_node("b", max_memory=STAGE_BYTES + KV_TOKENS * KV_BYTES)
    else:
        cluster.duties["b"].pause("a game")
        await cluster.until(lambda status: [n.node_id for n in status.nodes if n.state == "paused"] == ["b"])
        cluster.duties["b"].resume()


async def nothing_but_what_is_kept(cluster: MemoryCluster, inside: Any, stages: list[Stage]) -> None:
    """Once the batches have come back that sessions were in whose readers left: two lanes may overtake each other."""
    await cluster.until(lambda _: not inside.running)
    budget = inside.service.admission.budget
    assert (inside.waiting, budget.reserved) == ([], 0)
    kept = {each.cache: each.room for each in budget._kept}
    live = {stage.layers: stage for stage in stages}.values()
    await cluster.until(lambda _: all(set(stage.caches._sessions) <= set(kept) for stage in live))
    for stage in live:
        for number, cache in stage.caches._sessions.items():
            assert cache.nbytes <= kept[number] * KV_BYTES
            assert cache.length >= next(len(each.tokens) for each in budget._kept if each.cache == number)
        assert len(stage.caches) == len(kept)
