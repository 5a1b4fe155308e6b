"""What the user has chosen, kept in a file; a file that can't be read is set aside, never lost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import time
from pathlib import Path
from typing import Annotated

import msgspec

from core.errors import ConfigError
from core.trust.state_dir import StateDir
from node_app.joining import Target

Percent = Annotated[int, msgspec.Meta(ge=1, le=100)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=10**6)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Label = Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,64}\Z")]
_CLOCK = re.compile(r"(?:[01]\d|2[0-3]):[0-5]\d")


@dataclass(frozen=True, slots=True)
class Hours:
    """From `start` to `end` each day, both 'HH:MM'; past midnight where `end` comes first."""

    start: str
    end: str

    def __post_init__(self) -> None:
        for text in (self.start, self.end):
            if not _CLOCK.fullmatch(text):
                raise ValueError(f"{text!r} is not a time of day like 22:30")
        if self.start == self.end:
            raise ValueError("the hours begin and end at the same time")

    def include(self, now: time) -> bool:
        start, end = time.fromisoformat(self.start), time.fromisoformat(self.end)
        return start <= now < end if start < end else now >= start or now < end


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine gives. None switches a limit off, or takes the default that its name has elsewhere.

    `memory_gb` at most is offered. `threads` None: fewer than the free cores. `hours` None: all day. It pauses while
    other programs use more than `cpu_percent` of all cores or `gpu_percent`, or less than `free_memory_gb` is free.
    The defaults are met by a game, a build or a long export, not by browsing, though it be on two cores.
    """

    memory_gb: Positive | None = None
    threads: Threads | None = None
    device: str = "auto"
    hours: Hours | None = None
    pause_on_battery: bool = True
    cpu_percent: Percent | None = 75
    gpu_percent: Percent | None = 50
    free_memory_gb: Positive | None = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """`joined` is the cluster that it belongs to, None before the first invite. `paused`: the user's own pause.

    `labels` are words for this machine that planners may heed: whoever wants them writes them into the file.
    """

    node_id: str
    joined: Target | None = None
    paused: bool = False
    limits: Limits = field(default_factory=Limits)
    labels: tuple[Label, ...] = ()


class SettingsFile:
    """`complaint` says what became of a file that could not be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.complaint = ""

    def load(self, default: Settings) -> Settings:
        """What was saved last; `default`, which is saved, where nothing was or where it is broken.

        Raises ConfigError where the disk does not let it.
        """
        saved = StateDir(self.path.parent).read(self.path.name)
        if saved is not None:
            try:
                return msgspec.json.decode(saved, type=Settings)
            except (msgspec.DecodeError, ValueError) as error:
                aside = self._set_aside()
                self.complaint = f"the settings could not be read ({error}); they were set aside as {aside}"
        self.save(default)
        return default

    def save(self, settings: Settings) -> None:
        """Raises ConfigError where the disk does not take it."""
        text = msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n"
        StateDir(self.path.parent).write(self.path.name, text)

    def _set_aside(self) -> Path:
        aside = self.path.with_suffix(".broken")
        try:
            self.path.replace(aside)
        except OSError as error:
            raise ConfigError(f"{self.path} is broken, and can't be set aside", str(error)) from None
        return aside
