"""KV caches in 8 bits: each node holds them so, the plan and the budget count them so, and the text hardly changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from core.interfaces.dtypes import DType, KVDType
from core.testing.cluster_in_memory import memory_cluster

SECONDS = 300
TOKEN_BYTES = {KVDType.AUTO: 6 * 64 * 4, KVDType.INT8: 6 * (64 + 4 * 2)}
"""Of the tiny model's six layers, with two heads of keys and of values, in fp32 and in 8 bits."""


@pytest.mark.parametrize("kv_dtype", KVDType)
async def test_caches_are_held_and_counted_as_asked_for(
    model: Path, prompt: tuple[int, ...], oracle: str, inside: Any, kv_dtype: KVDType
) -> None:
    with trio.fail_after(SECONDS):
        async with memory_cluster(model, "a", "b", dtype=DType.FP32, kv_dtype=kv_dtype) as cluster:
            await cluster.ready()
            text = await cluster.text(prompt, 24)
            assert text == oracle or kv_dtype is KVDType.INT8
            assert text[:8] == oracle[:8]
            status = await cluster.until(lambda status: all(node.kv_bytes > 0 for node in status.nodes))
            held = sum(node.kv_bytes for node in status.nodes)
            assert held == 256 * TOKEN_BYTES[kv_dtype]
            assert held == sum(hop.kv_bytes for hop in inside(cluster).service.route.hops)
