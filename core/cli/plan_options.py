"""What plans are asked for on the command line: machines, links, pins, sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from core.errors import ConfigError
from core.interfaces.planner import COORDINATOR, Candidate, PlanFor, Wire

DEFAULT_PLANNER = "measured"
PlannerName = Annotated[str, typer.Option(help="How layers are divided among nodes (see `core plugins`).")]
PlanForName = Annotated[
    PlanFor, typer.Option("--plan-for", help="One answer as fast as can be, or many together as fast as can be.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option(metavar="NODE=0-10", help="That node has these layers, here 0 to 9; once per node. It is waited for."),
]
Excluded = Annotated[list[str] | None, typer.Option(metavar="NODE", help="It gets no layers; once per node.")]
PlannedContext = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Plan room for so many tokens of context in each layer. Default: 4096, or the model's.",
        min=1,
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(help="At most so many tokens of prompt and answer. Default: what model and memory allow.", min=2),
]

_NAME, _NUMBER = r"[\w.-]+", r"\d{1,9}(?:\.\d{1,9})?"
_UNITS = {"mb": 10**6, "gb": 10**9, "tb": 10**12}
_NODE = re.compile(
    rf"(?:(?P<name>{_NAME})=)?(?P<size>{_NUMBER}\s*[mgt]b)(?:,\s*(?P<ms>{_NUMBER})\s*ms)?", re.IGNORECASE
)
_SIZE = re.compile(rf"({_NUMBER})\s*([mgt]b)", re.IGNORECASE)
_LINK = re.compile(
    rf"(?P<one>{_NAME})(?::(?P<other>{_NAME}))?=(?P<ms>{_NUMBER})\s*ms(?:,\s*(?P<rate>{_NUMBER})\s*(?P<unit>[mg])bit)?",
    re.IGNORECASE,
)
_PIN = re.compile(rf"(?P<name>{_NAME})=(?P<start>\d{{1,6}})-(?P<end>\d{{1,6}})")
_COORDINATOR_NAME = "coordinator"


@dataclass(frozen=True, slots=True)
class NodeOption:
    """`token_seconds`: a token through the whole model on it, without any links; 0 if that is not told."""

    name: str
    memory: int
    token_seconds: float = 0.0

    def as_candidate(self, weight_bytes: Sequence[int]) -> Candidate:
        """With each layer taking its part of the time, by its bytes, and a tenth of the memory left free."""
        from core.coordinator.planning import node_memory

        share = self.token_seconds / sum(weight_bytes)
        row_seconds = tuple(nbytes * share for nbytes in weight_bytes) if self.token_seconds else ()
        return Candidate(self.name, node_memory(self.memory), "unknown", row_seconds=row_seconds)

    def with_head(self, nbytes: int) -> NodeOption:
        """The coordinator runs on its machine too, and holds so much there."""
        return replace(self, memory=max(0, self.memory - nbytes))


def parse_size(text: str, option: str) -> int:
    """`8gb` -> bytes. Raises ConfigError for what is no size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} {text!r} is no size", "", "write it as 8gb, 500mb or 1.5tb")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_node(text: str, unnamed: str, option: str = "--node") -> NodeOption:
    """`8gb`, `name=8gb` or `name=8gb,9ms`. Raises ConfigError for anything else."""
    match = _NODE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} {text!r} is no size", "", "write it as 8gb, 500mb, name=24gb or name=24gb,9ms")
    return NodeOption(match["name"] or unnamed, parse_size(match["size"], option), float(match["ms"] or 0) / 1000)


def parse_link(text: str) -> tuple[tuple[str, str], Wire]:
    """`mac:pc=3ms`, `mac:pc=3ms,1gbit` or `mac=3ms`: there and back, as `ping` tells it. Raises ConfigError."""
    match = _LINK.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"--link {text!r} is no link",
            "",
            "write it as mac:pc=3ms,1gbit or mac:pc=3ms; mac=3ms is to the coordinator",
        )
    ends = [match["one"], match["other"] or _COORDINATOR_NAME]
    one, other = (COORDINATOR if end == _COORDINATOR_NAME else end for end in ends)
    bits = float(match["rate"] or 0) * (10**9 if (match["unit"] or "").lower() == "g" else 10**6)
    return (one, other), Wire(float(match["ms"]) / 2000, bits / 8)


def links_of_machine(name: str, links: Mapping[tuple[str, str], Wire]) -> dict[tuple[str, str], Wire]:
    """The coordinator's links, if it runs on the machine of that node: none to it, and the node's to the others."""
    others = {other if one == name else one: wire for (one, other), wire in links.items() if name in (one, other)}
    return {(COORDINATOR, other): wire for other, wire in others.items() if other != COORDINATOR} | {
        (COORDINATOR, name): Wire(0.0)
    }


def parse_pins(texts: Iterable[str]) -> dict[str, range]:
    """`mac=0-10`: layers [0, 10). Raises ConfigError for anything else, and for a node that is told twice."""
    pins: dict[str, range] = {}
    for text in texts:
        match = _PIN.fullmatch(text.strip())
        if match is None or int(match["start"]) >= int(match["end"]):
            raise ConfigError(f"--pin {text!r} are no layers", "", "write it as mac=0-10, which are layers 0 to 9")
        if match["name"] in pins:
            raise ConfigError(f"--pin names {match['name']!r} twice", "", "a node has one run of layers")
        pins[match["name"]] = range(int(match["start"]), int(match["end"]))
    return pins


def parse_caps(texts: Iterable[str]) -> dict[str, int]:
    """`mac=16gb` -> bytes by node. Raises ConfigError for anything else."""
    caps: dict[str, int] = {}
    for text in texts:
        name, separator, size = text.partition("=")
        if not (name and separator):
            raise ConfigError(f"--node-memory {text!r} names no node", "", "write it as mac=16gb")
        caps[name] = parse_size(size, "--node-memory")
    return caps


def refuse_longer_context(context: int | None, most: int | None) -> None:
    """Raises ConfigError."""
    if most is not None and context is not None and context > most:
        raise ConfigError(f"--context {context} is more than --max-context {most}", "", "give one of the two")


def refuse_equal_names(names: Iterable[str]) -> None:
    """Raises ConfigError."""
    seen = list(names)
    for name in dict.fromkeys(seen):
        if (count := seen.count(name)) > 1:
            raise ConfigError(f"{count} nodes are called {name!r}", "", "give each --node a name of its own, or none")


def refuse_unknown_names(names: Iterable[str], nodes: Iterable[str]) -> None:
    """Raises ConfigError."""
    known = [COORDINATOR, *nodes]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no node {name!r}", f"there are: {', '.join(known[1:])}", "give one of these")
