"""Nodes that can't reach each other are relayed by the coordinator, with the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

from core.testing.cluster import open_cluster

SECONDS = 300
TOKENS = 48
PROMPTS = ("Hello", "Ünïcödé 漢字 🙂 and all", "The layers of one model lie on several machines. " * 20)
PLUGIN = '''
from contextlib import asynccontextmanager

from core import hookimpl
from core.errors import ChannelClosed
from core_plugin_websocket.transport import TrioWebsocketTransport


class HubTransport(TrioWebsocketTransport):
    """Reaches the first port that it dials, the coordinator's, and no other."""

    name = "hub"
    reached = None

    @asynccontextmanager
    async def dial(self, host, port, **options):
        self.reached = self.reached or port
        if port != self.reached:
            raise ChannelClosed(f"no connection to {host}:{port}", "a firewall is between")
        async with super().dial(host, port, **options) as channel:
            yield channel


@hookimpl
def core_transports():
    return [HubTransport]
'''


def install_plugin(folder: Path) -> None:
    """What pip leaves behind: the module, and the metadata with its entry point."""
    (folder / "hub_transport.py").write_text(PLUGIN)
    metadata = folder / "hub_transport-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hub-transport\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[core.plugins]\nhub = hub_transport\n")


async def test_nodes_behind_firewalls_are_relayed_and_answer_the_same(model: Path, oracle: Any, tmp_path: Path) -> None:
    install_plugin(tmp_path)
    options = ("--dtype", "fp32", "--transport", "hub", "--no-prefix-cache")
    with trio.fail_after(SECONDS):
        async with open_cluster(model, *options, local_nodes=3, env={"PYTHONPATH": str(tmp_path)}) as cluster:
            await cluster.wait_ready()
            nodes = sorted((await cluster.status())["nodes"], key=lambda node: node["layers"])
            assert [node["layers"] for node in nodes] == [[0, 2], [2, 4], [4, 6]]
            assert nodes[0]["link"] == ""
            for node in nodes[1:]:
                assert node["link"].startswith("relayed by the coordinator"), node
                assert "a firewall is between" in node["link"]
            async with cluster.client() as client:
                for prompt in PROMPTS:
                    body = {"model": cluster.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
                    answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
                    oracle.check(answer["choices"][0]["text"], oracle.encode(prompt), TOKENS)
            await cluster.wait_until(lambda status: all(node["kv_tokens"] == 0 for node in status["nodes"]))
