"""A node that can't load or compute its layers: the cluster does not become ready, and says who, which and why."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import trio
from safetensors.torch import load_file, save_file

from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster import Cluster, open_cluster

SECONDS = 300
NAME = "models/tiny"
"""The model's path, which each machine takes from its own working directory."""
WEIGHTS = "model.safetensors"


def poison(model: Path, layer: int) -> None:
    tensors = load_file(model / WEIGHTS)
    tensors[f"model.layers.{layer}.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, model / WEIGHTS, {"format": "pt"})


def truncate(model: Path) -> None:
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size - 1)


def flip_a_bit(model: Path) -> None:
    """Of a tensor of layer 3."""
    content = (model / WEIGHTS).read_bytes()
    stored = load_file(model / WEIGHTS)["model.layers.3.mlp.up_proj.weight"].numpy().tobytes()
    assert content.count(stored) == 1
    (model / WEIGHTS).write_bytes(content.replace(stored, bytes([stored[0] ^ 1]) + stored[1:]))


def change_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))


async def check_refuses_until(cluster: Cluster, *words: str) -> None:
    """The status comes to say all of `words`, and requests are refused with them."""
    await cluster.wait_until(lambda status: all(word in status["detail"] for word in words))
    assert (await cluster.status())["state"] != "ready"
    async with cluster.client() as client:
        answer = await client.post("/v1/completions", json={"model": cluster.model, "prompt": "Hello"})
    assert answer.status_code == 503
    assert all(word in answer.json()["error"]["message"] for word in words)


async def test_a_node_that_computes_nan_fails_the_proof_and_is_named(tmp_path: Path) -> None:
    poison(tiny_checkpoint(tmp_path / "poisoned", layers=4), layer=3)
    with trio.fail_after(SECONDS):
        async with open_cluster(tmp_path / "poisoned", "--min-nodes", "2", "--recovery-time", "0") as cluster:
            await cluster.start_node("a")
            await cluster.start_node("b")
            status = await cluster.wait_until(lambda status: "not finite" in status["detail"])
            culprit = next(node for node in status["nodes"] if node["state"] == "failed")
            await check_refuses_until(cluster, f"node {culprit['node_id']!r}", "failed on layers", "not finite")


async def test_a_node_that_cannot_load_says_why_and_another_takes_its_layers(tmp_path: Path) -> None:
    for machine in ("good", "cut short", "changed", "flipped"):
        tiny_checkpoint(tmp_path / machine / NAME, layers=4)
    truncate(tmp_path / "cut short" / NAME)
    change_config(tmp_path / "changed" / NAME)
    flip_a_bit(tmp_path / "flipped" / NAME)
    with trio.fail_after(SECONDS):
        async with open_cluster(NAME, "--recovery-time", "0", cwd=tmp_path / "good") as cluster:
            for name, words in (
                ("cut short", (WEIGHTS, "damaged")),
                ("changed", ("not the coordinator's model", "config.json")),
                ("flipped", ("not the coordinator's model", f"layer 3, in {WEIGHTS}, has other bytes")),
            ):
                await cluster.start_node(name, cwd=tmp_path / name)
                await check_refuses_until(cluster, f"node {name!r} could not load layers [0, 4)", *words)
                nodes = {node["node_id"]: node for node in (await cluster.status())["nodes"]}
                assert nodes[name]["state"] == "failed"
                assert all(word in nodes[name]["detail"] for word in words)
            await cluster.start_node("good")
            await cluster.wait_ready()
