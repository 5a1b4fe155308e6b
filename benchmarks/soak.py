"""Clients that come, and go at any moment: sixteen for two minutes; afterwards nothing of them may be left.

The demo's model on two local node processes. A client asks one of a few questions, and drops it at a random moment, or
reads it to its end; then its text must be the one that the question gets alone.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

import psutil
import trio
from _measure import local_cluster, machine, verdict

from core.coordinator.coordinator import Coordinator
from core.interfaces.dtypes import DType
from core.interfaces.engine import Conversation, GenerationRequest

CLIENTS = 16
QUESTIONS = (
    "Name three rivers.",
    "What is a lighthouse for?",
    "Write a short poem about rain.",
    "How do bees make honey?",
    "Why is the sky blue?",
)
TOKENS = 32
FREE_SECONDS = 5
FLAT = 1.1


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(machine())
    counts: Counter[str] = Counter()
    async with local_cluster(DType.FP32, prefix_cache=False) as server:
        coordinator, chance = server.coordinator, random.Random(asked.seed)
        alone = {question: await answer(coordinator, question) for question in QUESTIONS}
        await come_and_go(coordinator, alone, chance, counts, asked.seconds / 4)
        before = memory()
        await come_and_go(coordinator, alone, chance, counts, asked.seconds * 3 / 4)
        left = await left_over(coordinator)
        after = memory()
    print(
        f"sessions    {counts.total()}: {counts['dropped']} dropped, {counts['right']} right, {counts['wrong']} wrong"
    )
    print(
        f"left        {left['sessions']} sessions, {left['kv_tokens']} KV tokens, {left['batches']} batches under way"
    )
    growth = {name: after[name] / before[name] for name in before}
    print(
        "memory      " + ", ".join(f"{name} {before[name] / 1e6:.0f} -> {after[name] / 1e6:.0f} MB" for name in before)
    )
    print(verdict("200 sessions or more", counts.total() >= 200))
    print(verdict("all answers right", counts["wrong"] == 0))
    print(verdict("nothing left", not any(left.values())))
    print(verdict(f"memory flat (within {FLAT:g} x after a quarter of the time)", max(growth.values()) <= FLAT))


async def come_and_go(
    coordinator: Coordinator, alone: dict[str, str], chance: random.Random, counts: Counter[str], seconds: float
) -> None:
    async def client() -> None:
        while trio.current_time() < ending:
            question = chance.choice(QUESTIONS)
            with trio.move_on_after(chance.choice((0.02, 0.2, 1.0, 3.0, 1000.0)) * chance.random()) as scope:
                said = await answer(coordinator, question)
            kind = "dropped" if scope.cancelled_caught else "right" if said == alone[question] else "wrong"
            counts[kind] += 1

    ending = trio.current_time() + seconds
    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(client)


async def answer(coordinator: Coordinator, question: str) -> str:
    request = GenerationRequest(Conversation(({"role": "user", "content": question},)), TOKENS, temperature=0)
    async with coordinator.generate(request) as generation:
        return "".join([delta.text async for delta in generation])


async def left_over(coordinator: Coordinator) -> dict[str, int]:
    """What there is still of sessions, once there is nothing or the time for it has passed."""
    live = coordinator._live
    assert live is not None and live.generator is not None
    with trio.move_on_after(FREE_SECONDS):
        while True:
            status = coordinator.status()
            left = {
                "sessions": status.sessions + sum(node.sessions for node in status.nodes),
                "kv_tokens": status.kv.reserved + sum(node.kv_tokens for node in status.nodes),
                "batches": sum(service.route.in_flight for service in live.generator.router.services),
            }
            if not any(left.values()):
                break
            await trio.sleep(0.05)
    return left


def memory() -> dict[str, float]:
    """Resident bytes of this process and of its nodes."""
    own = psutil.Process()
    nodes = [child for child in own.children(recursive=True) if "node" in child.cmdline()]
    return {"coordinator": own.memory_info().rss} | {
        f"node {number}": child.memory_info().rss for number, child in enumerate(nodes, 1)
    }


if __name__ == "__main__":
    trio.run(main)
