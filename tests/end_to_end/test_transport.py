"""A cluster over plain TCP: the host says so once, and whoever joins by its invite need not."""

from __future__ import annotations

from pathlib import Path

import trio

from core.testing.cluster import open_cluster
from core.trust.invite import new_invite
from core.trust.state_dir import StateDir

SECONDS = 300


async def test_who_joins_by_an_invite_comes_by_the_hosts_transport(model: Path, tmp_path: Path) -> None:
    host, friend = tmp_path / "host", tmp_path / "friend"
    options = ("--transport", "tcp", "--node-host", "0.0.0.0", "--advertise", "127.0.0.1", "--min-nodes", "2")
    with trio.fail_after(SECONDS):
        async with open_cluster(model, *options, "--state-dir", str(host), local_nodes=1) as cluster:
            _, link = new_invite(StateDir.open(host), 3600)
            (tmp_path / "invite").write_text(str(link))
            await cluster.start_node("friend", "--join", str(tmp_path / "invite"), "--state-dir", str(friend))
            await cluster.wait_ready(SECONDS)
            nodes = (await cluster.status())["nodes"]
            async with cluster.client() as client:
                asked = {"model": cluster.model, "prompt": "Hello", "max_tokens": 8}
                (await client.post("/v1/completions", json=asked)).raise_for_status()
    assert len([node for node in nodes if node["layers"]]) == 2
    assert [node["link"] for node in nodes if node["link"]] == ["direct"]
