"""How this core was installed, and by what command a plugin comes beside it."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path

DISTRIBUTION = "core-cluster"


class Installer(StrEnum):
    PIP = "pip"
    PIPX = "pipx"
    UV_TOOL = "uv tool"
    APP = "app"
    """The packed tray app: it has all that it will ever have."""


def installer() -> Installer:
    """Of the environment that runs this."""
    environment = Path(sys.prefix)
    if getattr(sys, "frozen", False):
        return Installer.APP
    if (environment / "pipx_metadata.json").exists():
        return Installer.PIPX
    if (environment / "uv-receipt.toml").exists():
        return Installer.UV_TOOL
    return Installer.PIP


def how_to_install(distribution: str, version: str, by: str) -> str:
    """What to do, as an instruction. `by` is an Installer's value; of another one pip is told."""
    wanted = f"{distribution}=={version}"
    is_core = distribution == DISTRIBUTION
    if by == Installer.APP:
        if is_core:
            return f"install the app of core {version}"
        return (
            "the packed app takes no plugins: "
            f"install core by pipx in its place, and run `pipx inject {DISTRIBUTION} {wanted}`"
        )
    if by == Installer.PIPX:
        return f"run `pipx install --force {wanted}`" if is_core else f"run `pipx inject {DISTRIBUTION} {wanted}`"
    if by == Installer.UV_TOOL:
        return f"run `uv tool install {wanted}`" if is_core else f"run `uv tool install {DISTRIBUTION} --with {wanted}`"
    return f"run `pip install {wanted}`"
