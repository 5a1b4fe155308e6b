"""What the app shows, as one frozen value; and every word of it, as functions of that value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TOOLTIP_LENGTH = 127
"""Windows shows no more characters."""
_REASON_LENGTH = 60


class State(StrEnum):
    NOT_JOINED = "not joined"
    CONNECTING = "connecting"
    WAITING = "waiting"
    DOWNLOADING = "downloading"
    LOADING = "loading"
    READY = "ready"
    BUSY = "busy"
    PAUSED = "paused"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Status:
    """The node at one moment. `cluster` is where it belongs to ("" for nowhere), `model` what that serves.

    `layers` are those that it holds, `memory` the bytes that they and their caches take. `progress` is bytes done and
    in all of a download or a load. `reason` says why, where the state alone does not: of a pause, an error, a wait.
    `code` is what the host is to be told while it is asked.
    """

    state: State = State.NOT_JOINED
    cluster: str = ""
    model: str = ""
    layers: range | None = None
    memory: int = 0
    tokens_today: int = 0
    tokens_per_second: float = 0.0
    progress: tuple[int, int] | None = None
    reason: str = ""
    code: str = ""

    @property
    def fraction(self) -> float | None:
        """Of the progress, from 0 to 1."""
        if self.progress is None or self.progress[1] <= 0:
            return None
        return min(1.0, self.progress[0] / self.progress[1])


def headline(status: Status) -> str:
    """The state in a few words, without the reason."""
    match status.state:
        case State.NOT_JOINED:
            return "Not joined to a cluster"
        case State.CONNECTING if status.code:
            return "Waiting for the host's answer"
        case State.CONNECTING:
            return "Connecting" if status.reason else f"Connecting to {status.cluster}"
        case State.WAITING:
            return "Waiting for a plan"
        case State.DOWNLOADING:
            return "Downloading" + _percent(status)
        case State.LOADING:
            return "Loading layers" + _percent(status)
        case State.READY:
            return "Ready"
        case State.BUSY:
            return f"Busy, {status.tokens_per_second:.3g} tokens/s"
        case State.PAUSED:
            return "Paused"
        case State.ERROR:
            return "Something went wrong"


def sentence(status: Status) -> str:
    """The state and the reason for it."""
    return f"{headline(status)}: {status.reason}" if status.reason else headline(status)


def tooltip(status: Status) -> str:
    parts = [sentence(status)]
    if status.layers is not None:
        parts.append(f"{holdings(status)}")
    return clip("core · " + " · ".join(parts), TOOLTIP_LENGTH)


def holdings(status: Status) -> str:
    """Layers and memory, for instance 'layers 0 to 11, 1.2 GB'."""
    if status.layers is None:
        return "no layers"
    first, last = status.layers.start, status.layers.stop - 1
    layers = f"layer {first}" if first == last else f"layers {first} to {last}"
    return f"{layers}, {show_bytes(status.memory)}"


def served(status: Status) -> str:
    count = status.tokens_today
    return f"{count:,} token{'' if count == 1 else 's'} today"


def show_bytes(value: int) -> str:
    return f"{value / 10**9:.1f} GB" if value >= 10**9 else f"{value / 10**6:.0f} MB"


def clip(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3].rstrip() + "..."


def _percent(status: Status) -> str:
    return "" if status.fraction is None else f" {status.fraction:.0%}"


class Action(StrEnum):
    """What a line of the menu does."""

    JOIN = "join"
    PAUSE = "pause"
    RESUME = "resume"
    PAGE = "page"
    LIMITS = "limits"
    START_AT_LOGIN = "start at login"
    LOGS = "logs"
    ABOUT = "about"
    QUIT = "quit"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the menu: a plain text where `action` is None, a separator where there is no text either.

    `checked` is None for a line that can't be ticked.
    """

    text: str = ""
    action: Action | None = None
    checked: bool | None = None


SEPARATOR = Line()


def _duty(status: Status, *, resumable: bool) -> Line:
    if status.state is State.ERROR:
        return Line("Try again", Action.RESUME)
    return Line("Resume", Action.RESUME) if resumable else Line("Pause", Action.PAUSE)


def menu(status: Status, *, resumable: bool, at_login: bool, version: str) -> tuple[Line, ...]:
    """`resumable`: it is paused, and its user can end that. `at_login`: whether it starts at login."""
    lines = [Line(clip(sentence(status), _REASON_LENGTH))]
    if status.cluster:
        lines.append(Line(clip(f"Cluster: {status.cluster}", _REASON_LENGTH)))
    if status.model:
        lines.append(Line(clip(f"Model: {status.model}", _REASON_LENGTH)))
    if status.layers is not None:
        lines.append(Line(f"Holds {holdings(status)}"))
    if status.cluster:
        lines.append(Line(f"{served(status)}, {status.tokens_per_second:.3g} tokens/s now"))
    return (
        *lines,
        SEPARATOR,
        Line("Join...", Action.JOIN),
        *([_duty(status, resumable=resumable)] if status.cluster else []),
        Line("Open status page", Action.PAGE),
        Line("Limits...", Action.LIMITS),
        Line("Start at login", Action.START_AT_LOGIN, checked=at_login),
        Line("Show logs", Action.LOGS),
        SEPARATOR,
        Line(f"About core {version}", Action.ABOUT),
        Line("Quit", Action.QUIT),
    )
