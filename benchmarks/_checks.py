"""What the checks of clients have in common: what they are given, and how each is told."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

from _browser import Pages

from core.testing.cluster import Cluster

KEY = "the-key-of-these-checks"
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
PROGRAM_SECONDS = 900
"""An agent's prompt has thousands of tokens, which two cores take minutes for."""
ERROR_LENGTH = 600


class Missing(Exception):
    """What a check needs is not installed; the message says how to get it."""


@dataclass(frozen=True)
class Setting:
    """`npm` is a folder where npm installed, `python` a Python that has programs of Python."""

    cluster: Cluster
    pages: Pages
    npm: Path | None
    python: str
    browser: str | None

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": self.cluster.api}


@dataclass(frozen=True)
class Check:
    """`version` raises Missing where there is none; `run` tells what it got, and raises where that isn't right."""

    client: str
    name: str
    version: Callable[[Setting], str]
    run: Callable[[Setting], str]


def npm_package(package: str, *others: str) -> Callable[[Setting], str]:
    def version(setting: Setting) -> str:
        manifest = (setting.npm or Path()) / "node_modules" / package / "package.json"
        if setting.npm is None or not manifest.exists() or not which("node"):
            raise Missing(f"npm install --prefix FOLDER {' '.join((package, *others))}, and --npm-dir FOLDER")
        return str(json.loads(manifest.read_text())["version"])

    return version


def python_program(package: str, how: str) -> Callable[[Setting], str]:
    """The version that the Python of the setting has."""
    script = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"

    def version(setting: Setting) -> str:
        try:
            return output(setting.python, "-c", script, package)
        except RuntimeError:
            raise Missing(f"pip install {how}, and --python of where that is") from None

    return version


def output(*command: str, env: Mapping[str, str] | None = None, folder: Path | None = None, given: str = "") -> str:
    """What a command prints that reads `given`. Raises RuntimeError where it fails."""
    done = subprocess.run(
        command,
        env=env,
        cwd=folder,
        input=given,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-ERROR_LENGTH:]}")
    return done.stdout.strip()


def right(text: str) -> str:
    assert EXPECTED in text, f"{EXPECTED} is not in {text!r}"
    return text


def call_request(name: str, **arguments: Any) -> str:
    """What has the demo's model, with the template of these checks, call a function."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"Answer with exactly this and nothing else:\n<tool_call>\n{call}\n</tool_call>"
