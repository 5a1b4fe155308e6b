"""What is said of why there is no route: what holds now, once for each node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from core.coordinator.absences import Absences
from core.errors import CoreError, PlanError, RouteError

LOST = RouteError("node 'b' was lost with layers [3, 6)", "it was closed", node="b", layers="[3, 6)")
STALLED = RouteError("the route gave no answer", "2 were in flight")
TOO_FEW = PlanError("1 more node must join", missing_nodes=1)


def member(
    node_id: str, *, paused: str = "", failed: str = "", leaves: bool = False, is_local: bool = False
) -> SimpleNamespace:
    return SimpleNamespace(
        node_id=node_id,
        paused=paused,
        leaves=leaves,
        absence="left" if leaves else "is paused",
        failed_lately=bool(failed),
        is_available=not (paused or failed),
        failure=SimpleNamespace(reason=failed) if failed else None,
        is_local=is_local,
    )


def absences(*members: Any, lost: CoreError | None = None) -> Absences:
    return Absences(members, lost)


A = member("a")


@pytest.mark.parametrize(
    ("there", "lost", "said"),
    [
        ([A], None, []),
        ([A], LOST, [str(LOST)]),
        ([A, member("b")], LOST, []),
        ([A, member("b", paused="a game")], LOST, ["node 'b' is paused: a game"]),
        ([A, member("b", failed="layer 3 has other bytes")], LOST, [str(LOST)]),
        ([A, member("c", failed="layer 3 has other bytes")], LOST, [
            str(LOST),
            "node 'c' is left out for a while: layer 3 has other bytes",
        ]),
        ([A, member("b", paused="bye", leaves=True)], None, ["node 'b' left: bye"]),
        ([A, member("b")], STALLED, [str(STALLED)]),
    ],
    ids=["nothing", "lost", "back", "paused", "failed", "two", "leaves", "nobody's"],
)  # fmt: skip
def test_each_reason_is_said_once_and_while_it_holds(there: list[Any], lost: CoreError | None, said: list[str]) -> None:
    assert absences(*there, lost=lost).sentences() == said


@pytest.mark.parametrize(
    ("there", "local_nodes", "said"),
    [
        ([A], 0, "1 more node must join"),
        ([A], 1, "a node of this machine starts"),
        ([A], 2, "2 nodes of this machine start"),
        ([member("local-1", is_local=True)], 1, "1 more node must join"),
        ([A, member("b", paused="a game")], 0, "1 more node must join, or come back"),
        ([A, member("b", failed="no memory")], 0, "1 more node must join, or come back"),
        ([A, member("b", paused="bye", leaves=True)], 0, "1 more node must join"),
    ],
)
def test_one_more_node_is_asked_for_only_if_that_is_what_helps(there: list[Any], local_nodes: int, said: str) -> None:
    assert absences(*there).waited_for(TOO_FEW, local_nodes) == said


def test_a_node_that_finishes_what_runs_has_not_left_yet() -> None:
    there: list[Any] = [A, member("b", paused="bye", leaves=True)]
    assert Absences(there, None, there[1]).sentences() == ["node 'b' leaves, what runs is finished first: bye"]


def test_what_a_plan_lacks_else_is_said_as_it_is() -> None:
    error = PlanError("the model does not fit", "3 GB are missing", "add a node")
    assert absences(A, member("b", paused="a game")).waited_for(error, 2) == str(error)
