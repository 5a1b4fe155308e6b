"""What is simulated: a cluster and what is asked of it, as a short description. It reads from TOML."""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from core.errors import ConfigError

COORDINATOR = "coordinator"
"""What the coordinator's machine is called at the end of a link."""
Times = tuple[tuple[int, float], ...]
"""(rows, milliseconds): what a batch of so many rows takes. Between two of them it grows evenly."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the description: a field that it does not have is refused."""


class Model(_Table, frozen=True, kw_only=True):
    """`layers` of `layer_mb` megabytes each as a node holds them; a token leaves `kv_kb` kilobytes in a layer's cache.

    Hidden states have `hidden_size` values of two bytes. `context` is the longest that the model takes, in tokens.
    """

    layers: int
    layer_mb: float
    kv_kb: float = 4.0
    hidden_size: int = 4096
    context: int = 8192


class Coordinator(_Table, frozen=True, kw_only=True):
    """`head_ms` is what head, sampling and embedding take for so many rows; `message_ms` as a Machine's."""

    head_ms: Times = ((1, 1.0),)
    message_ms: float = 0.3
    site: str = ""


class Machine(_Table, frozen=True, kw_only=True):
    """`count` machines called `name`, or "`name`-1", "`name`-2" and so on.

    `layer_ms` is what one layer takes for so many rows, `context_ms` what 1,000 tokens of context add to that for each
    row, and `cache_ms` for each session, however many rows it has; `message_ms` is what its programs add to each
    message that it takes in, while they compute nothing. Each batch takes longer by one of the factors of `scatter`,
    all of which are as likely: so other programs make times differ. It loads `load_mb_per_s`, and offers `memory_gb`
    for layers and caches. Machines of one `site` are linked by the `lan`, each machine without a site is alone at its
    own. It joins `joins` seconds after the cluster was first ready, if not before that.
    """

    name: str
    memory_gb: float
    layer_ms: Times
    count: int = 1
    context_ms: float = 0.0
    cache_ms: float = 0.0
    message_ms: float = 0.3
    scatter: tuple[float, ...] = (1.0,)
    load_mb_per_s: float = 1000.0
    site: str = ""
    joins: float | None = None

    def layer_seconds(self, rows: int, context: int = 0, cached: int = 0) -> float:
        """Of a batch of `rows`, whose rows have `context` tokens before them in all, and whose sessions `cached`."""
        thousands = self.context_ms * context + self.cache_ms * cached
        return (milliseconds(self.layer_ms, rows) + thousands / 1000) / 1000


class Wire(_Table, frozen=True, kw_only=True):
    """One way: a message takes `delay_ms` and up to `jitter_ms` more, beside its bytes at `mbit` a second (0: none)."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit: float = 0.0


class Link(Wire, frozen=True, kw_only=True):
    """The wire between two machines or sites, by their names."""

    between: tuple[str, str]


class Happening(StrEnum):
    """What becomes of a machine."""

    DIES = "dies"
    """Its process ends: all who are connected to it learn of that at once."""
    VANISHES = "vanishes"
    """Its cable is cut: nobody is told."""
    RETURNS = "returns"
    """It is started again, or plugged in, and holds nothing."""
    LEAVES = "leaves"
    """It says goodbye first."""
    PAUSES = "pauses"
    RESUMES = "resumes"
    SLOWS = "slows"
    """From then on all that it computes takes `factor` times as long as described."""


class Event(_Table, frozen=True, kw_only=True):
    """`at` seconds after the cluster was first ready, to the machine of that name, or to the one that has that place on
    the route then: 0 is the first. If no route serves, nothing befalls that one."""

    at: float
    machine: str | int
    what: Happening
    factor: float = 1.0


class Load(_Table, frozen=True, kw_only=True):
    """Either `streams` clients, who ask one thing after another, `turns` times; or `per_minute` requests of as many
    clients at random moments, for `seconds`. They begin `starts` seconds after the cluster was first ready.

    Prompts and answers have a length within their bounds, in tokens, every one as likely. With `follow_up` the later
    turns are a chat's: what was said before, and so many tokens more.
    """

    name: str = "stream"
    starts: float = 0.0
    streams: int = 0
    turns: int = 1
    follow_up: tuple[int, int] | None = None
    per_minute: float = 0.0
    seconds: float = 60.0
    prompt: tuple[int, int] = (100, 100)
    answer: tuple[int, int] = (100, 100)


class Description(_Table, frozen=True, kw_only=True):
    """`settings` are more of CoordinatorSettings, by their names. The simulation ends after `limit` seconds at most."""

    model: Model
    machines: tuple[Machine, ...]
    load: tuple[Load, ...]
    title: str = ""
    seed: int = 0
    limit: float = 3600.0
    coordinator: Coordinator = Coordinator()
    wires: Wire = Wire(delay_ms=1.0)
    lan: Wire = Wire(delay_ms=0.1, mbit=1000.0)
    links: tuple[Link, ...] = ()
    events: tuple[Event, ...] = ()
    settings: dict[str, bool | int | float | str] = {}

    @classmethod
    def read(cls, path: Path) -> Description:
        """Raises ConfigError for a file that is no description, naming the field."""
        try:
            return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), cls)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path} describes no cluster", str(error)) from error

    def __post_init__(self) -> None:
        names = {*self.sites(), *self.sites().values()}
        named = [end for link in self.links for end in link.between]
        for name in (*named, *(event.machine for event in self.events)):
            if isinstance(name, str) and name not in names:
                raise ValueError(f"no machine or site is called {name!r}")

    def named_machines(self) -> Iterator[tuple[str, Machine]]:
        """Each machine by its own name."""
        for machine in self.machines:
            names = [machine.name] if machine.count == 1 else [f"{machine.name}-{n + 1}" for n in range(machine.count)]
            yield from ((name, machine) for name in names)

    def sites(self) -> dict[str, str]:
        """Where each machine is, by name; one without a site is at a place that has its name."""
        by_machine = {name: machine.site or name for name, machine in self.named_machines()}
        return {COORDINATOR: self.coordinator.site or COORDINATOR, **by_machine}

    def wire(self, one: str, other: str) -> Wire:
        """Between two machines: a link between these, or between their sites, or what joins all others."""
        sites = self.sites()
        for ends in ({one, other}, {sites[one], sites[other]}):
            for link in self.links:
                if set(link.between) == ends:
                    return link
        return self.lan if sites[one] == sites[other] else self.wires


def milliseconds(times: Times, rows: int) -> float:
    """What `rows` take. Fewer than the first ones take as long as those; more than the last ones go on as evenly."""
    points = sorted(times)
    if len(points) == 1:
        return points[0][1] * max(1.0, rows / points[0][0])
    place = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
    (few, low), (many, high) = points[place - 1], points[place]
    return low + (high - low) * max(0, rows - few) / (many - few)
