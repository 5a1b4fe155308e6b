"""Proves a packed app: it tells its version, holds no file twice, joins a cluster, serves it, leaves the browser to the
desktop's libraries, and ends when it is told.

python packaging/smoke.py dist/core-node/core-node
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import trio

from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster import open_cluster

SECONDS = 180
LARGE = 2**20
SEEN = "browser-environment"


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def twice(folder: Path) -> list[list[str]]:
    """Large files of the same content."""
    found = defaultdict(list)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size > LARGE:
            found[hashlib.sha256(path.read_bytes()).digest()].append(str(path.relative_to(folder)))
    return [paths for paths in found.values() if len(paths) > 1]


def apart_from_the_desktop(scratch: Path) -> dict[str, str]:
    """A browser that only notes its environment. On Linux, it finds no display, says so, and writes its link handler
    elsewhere."""
    browser = scratch / "browser"
    browser.write_text(f"#!/bin/sh\nenv > {scratch}/{SEEN}.part && mv {scratch}/{SEEN}.part {scratch}/{SEEN}\n")
    browser.chmod(0o700)
    own = {"DISPLAY": "", "XDG_DATA_HOME": str(scratch), "XDG_CONFIG_HOME": str(scratch)}
    return {**own, "BROWSER": str(browser)}


async def serves(program: Path, scratch: Path) -> None:
    async with open_cluster(tiny_checkpoint(scratch), "--min-nodes", "1") as cluster:
        command = [str(program), "--folder", str(scratch / "app"), f"127.0.0.1:{cluster.node_port}"]
        process = await trio.lowlevel.open_process(command, env=os.environ | apart_from_the_desktop(scratch))
        try:
            await cluster.wait_ready(SECONDS)
            async with cluster.client() as client:
                body = {"model": cluster.model, "prompt": "Hello", "max_tokens": 8}
                (await client.post("/v1/completions", json=body)).raise_for_status()
            assert "No module" not in (scratch / "app/logs/core-node.log").read_text(), "a part of it is missing"
            assert "_internal" not in (scratch / SEEN).read_text(), "its libraries would be the browser's"
            process.send_signal(signal.SIGTERM)
            with trio.fail_after(30):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()


def main() -> None:
    program = Path(sys.argv[1]).resolve()
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=120, check=True).stdout
    print(f"{version.strip()}: {size(program.parent) / 1e9:.2f} GB")
    assert not (doubled := twice(program.parent)), f"packed twice: {doubled}"
    if sys.platform != "win32":  # a program without a console takes no signal there
        with tempfile.TemporaryDirectory() as scratch:
            trio.run(serves, program, Path(scratch))
        print("it joined, served and ended")


main()
