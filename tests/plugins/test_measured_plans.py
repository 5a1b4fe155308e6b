"""The planner `measured`: as fast as the best plan of all, whatever the order of joining, and in plain words."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from core_plugin_planner.measured import MeasuredPlanner

from core import COORDINATOR, Candidate, Plan, PlanError, PlanFor, PlanRequest, Wire
from core.coordinator.planning import planned
from core.testing.brute_force import least_seconds, random_request, seconds
from core.testing.contracts import PlannerContract

GB = 10**9
CABLE = Wire(0.0002, 125e6)
RADIO = Wire(0.008, 6e6)


class TestMeasured(PlannerContract):
    joining_decides = False

    @pytest.fixture
    def planner(self) -> MeasuredPlanner:
        return MeasuredPlanner()


def node(
    name: str, gigabytes: float, whole: float = 0.0, layers: int = 40, *, held: range = range(0), **more: object
) -> Candidate:
    """`whole`: milliseconds that a token takes through all layers; 0: not known."""
    row_seconds = (whole / 1000 / layers,) * layers if whole else ()
    made = Candidate(name, int(gigabytes * GB), "cpu", row_seconds=row_seconds, held=frozenset(held))
    return replace(made, **more)  # type: ignore[arg-type]


def request(
    *nodes: Candidate, layers: int = 40, wires: Mapping[tuple[str, str], Wire] | None = None, **more: object
) -> PlanRequest:
    """Layers of 400 MB, on cables unless it says otherwise."""
    cables = {(COORDINATOR, each.node_id): CABLE for each in nodes}
    asked = PlanRequest(
        (GB * 4 // 10,) * layers, nodes, weight_bytes=(GB * 38 // 100,) * layers, row_bytes=8192, wires=wires or cables
    )
    return replace(asked, **more)  # type: ignore[arg-type]


def plan(asked: PlanRequest) -> Plan:
    return MeasuredPlanner().plan(asked)


def ranges(made: Plan) -> list[tuple[str, int, int]]:
    return [(stage.node_id, stage.start, stage.end) for stage in made.stages]


@pytest.mark.parametrize(("max_nodes", "near"), [(8, 1.02), (0, 1.3)], ids=["exact", "search"])
def test_a_plan_is_nearly_as_fast_as_the_best_of_all(
    max_nodes: int, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core_plugin_planner.solve.MAX_NODES", max_nodes)
    rng, fitted = random.Random(3), 0
    for _ in range(60):
        asked = random_request(rng, rng.randint(1, 5), rng.randint(1, 9))
        best = least_seconds(asked)
        if best is None:
            with pytest.raises(PlanError):
                plan(asked)
            continue
        fitted += 1
        assert best * (1 - 1e-6) <= seconds(plan(asked), asked) <= near * best + 1e-6
    assert 20 < fitted < 60


def test_many_machines_are_planned_as_well_as_few() -> None:
    """Nobody knows the best plan of many; but machines that nobody would take make it no worse."""
    few = random_request(random.Random(5), 6, 24, PlanFor.LATENCY)
    slow = [Candidate(f"idle-{index}", sum(few.layer_bytes), "cpu", row_seconds=(10.0,) * 24) for index in range(40)]
    wires = {(COORDINATOR, each.node_id): Wire(0.1) for each in slow}
    many = replace(few, candidates=(*slow, *few.candidates), wires={**few.wires, **wires})
    assert seconds(plan(many), many) <= 1.02 * seconds(plan(few), few)


def test_the_order_of_joining_decides_nothing() -> None:
    rng = random.Random(4)
    for _ in range(20):
        asked = random_request(rng)
        others = list(asked.candidates)
        rng.shuffle(others)
        try:
            made = plan(asked)
        except PlanError:
            continue
        assert plan(replace(asked, candidates=tuple(others))) == made


def test_a_model_that_fits_a_quick_machine_goes_there_though_a_slow_one_has_more_memory() -> None:
    made = plan(request(node("server", 60, 220), node("pc", 22, 17)))
    assert ranges(made) == [("pc", 0, 40)]
    assert made.left_out[0][1].startswith("spare: with it, a token would take 5.3 ms longer (")


def test_times_that_are_near_each_other_are_told_apart() -> None:
    wires = {(COORDINATOR, "pc"): Wire(0.0), (COORDINATOR, "mac"): Wire(0.0004)}
    made = plan(request(node("pc", 22, 26.6), node("mac", 22, 26.6), wires=wires))
    assert "0.80 ms longer (27.4 ms instead of 26.6 ms)" in dict(made.left_out)["mac"]


@pytest.mark.parametrize("plan_for", PlanFor)
def test_machines_that_are_alike_share_alike(plan_for: PlanFor) -> None:
    made = plan(request(node("b", 15, 40), node("a", 15, 40), plan_for=plan_for))
    assert ranges(made) == [("a", 0, 20), ("b", 20, 40)]
    made = plan(request(node("b", 15, 40), node("a", 15, 40.2), plan_for=plan_for))
    assert all(stage.end - stage.start >= 15 for stage in made.stages), "what measuring is off by decides little"


def test_a_slow_machine_between_quick_ones_and_one_far_away_are_left_out() -> None:
    wires = {(COORDINATOR, name): CABLE for name in ("a", "b", "slow")} | {(COORDINATOR, "far"): RADIO}
    made = plan(request(node("a", 9, 40), node("b", 9, 40), node("slow", 60, 300), node("far", 20, 30), wires=wires))
    assert [stage.node_id for stage in made.stages] == ["a", "b"]
    assert {name for name, why in made.left_out if "longer" in why} == {"slow", "far"}


def test_the_order_of_stages_follows_the_wires() -> None:
    wires = {(COORDINATOR, name): CABLE for name in ("a", "b", "c")} | {("a", "b"): RADIO}
    made = plan(request(node("a", 6, 40), node("b", 6, 40), node("c", 6, 40), wires=wires))
    assert [stage.node_id for stage in made.stages][1] == "c"


def test_for_throughput_the_slowest_machine_decides() -> None:
    nodes = node("pc", 22, 20), node("laptop", 22, 60)
    assert ranges(plan(request(*nodes))) == [("pc", 0, 40)]
    made = plan(request(*nodes, plan_for=PlanFor.THROUGHPUT))
    assert sorted(ranges(made))[1][0] == "pc"
    assert {stage.node_id: stage.end - stage.start for stage in made.stages} == {"pc": 30, "laptop": 10}
    assert made.notes[0].startswith("The slowest machine is laptop: it needs 15 ms for a token.")


def test_a_machine_that_reads_prompts_slowly_is_left_out_though_it_writes_quickly() -> None:
    writer = node("writer", 22, 20, chunk_seconds=(0.1,) * 40)
    reader = node("reader", 22, 30, chunk_seconds=(0.01,) * 40)
    assert ranges(plan(request(writer, reader))) == [("writer", 0, 40)]
    made = plan(request(writer, reader, prompt_rows=2.0))
    assert ranges(made) == [("reader", 0, 40)]
    assert "A question of 750 words is read in about 1.7 s" in made.notes[1]
    assert "with it, a token with its prompt would take 0.85 ms longer" in made.left_out[0][1]
    untimed = node("untimed", 22, 15)
    made = plan(request(writer, reader, untimed, prompt_rows=2.0))
    assert ranges(made) == [("reader", 0, 40)], "prompts that were not timed are not free"


@pytest.mark.parametrize("plan_for", PlanFor)
@pytest.mark.parametrize("in_haste", [False, True])
@pytest.mark.parametrize("nodes", [3, 10])
def test_figures_that_cant_be_spoil_no_plan_that_others_make(plan_for: PlanFor, in_haste: bool, nodes: int) -> None:
    honest = [node(f"honest-{index}", 6, 40, held=range(index, index + 1)) for index in range(nodes)]
    odd = [math.nan, math.inf, -math.inf, -1.0, 1e300, 0.0]
    liars = [
        node(f"liar-{index}", 60, chunk_seconds=(x,) * 40, row_seconds=(x,) * 40, load_speed=abs(x))
        for index, x in enumerate(odd)
    ]
    wires = {(COORDINATOR, each.node_id): CABLE for each in honest}
    wires |= {(COORDINATOR, each.node_id): Wire(x, x) for each, x in zip(liars, odd, strict=True)}
    asked = request(*honest, *liars, wires=wires, plan_for=plan_for, in_haste=in_haste, prompt_rows=2.0)
    made = planned(MeasuredPlanner(), asked)
    assert made.stages
    slow = [node("slow", 60, 40)]
    wires = {(COORDINATOR, "slow"): Wire(60.0, 1.0)}
    assert planned(MeasuredPlanner(), request(*slow, wires=wires, in_haste=in_haste, row_bytes=2**20)).stages


def test_others_machines_are_used_only_if_it_does_not_fit_without_them() -> None:
    shared = node("office", 60, 5, labels=frozenset({"shared"}))
    made = plan(request(node("a", 22, 90), shared))
    assert ranges(made) == [("a", 0, 40)]
    assert dict(made.left_out)["office"] == "spare: others use it too, and the model fits without it"
    assert "office" in {stage.node_id for stage in plan(request(node("a", 12, 90), shared)).stages}
    assert "office" in {
        stage.node_id for stage in plan(request(node("a", 22, 90), shared, pins={"office": range(2)})).stages
    }


def test_layers_stay_where_they_are_pinned() -> None:
    made = plan(request(node("a", 22, 10), node("b", 22, 90), pins={"b": range(10, 14)}))
    assert ranges(made) == [("b", 0, 14), ("a", 14, 40)]
    assert any(note.startswith("b costs") and "asked for" in note for note in made.notes)


@pytest.mark.parametrize(
    ("pins", "told"),
    [
        ({"c": range(2)}, "pinned to node 'c', which is not there"),
        ({"a": range(30, 41)}, "there are 40"),
        ({"a": range(10), "b": range(9, 20)}, "layer 9 to node 'a' and to node 'b'"),
        ({"b": range(40)}, "without the pins it would"),
    ],
)
def test_pins_that_no_plan_could_have_are_refused(pins: dict[str, range], told: str) -> None:
    with pytest.raises(PlanError, match="pinned") as refused:
        plan(request(node("a", 22, 10), node("b", 5, 10), pins=pins))
    assert told in str(refused.value)


def test_what_is_held_stays_where_it_is_if_that_is_nearly_as_fast() -> None:
    held = node("b", 22, 20.2, held=range(40))
    assert ranges(plan(request(node("a", 22, 20), held))) == [("b", 0, 40)]
    assert ranges(plan(request(node("a", 22, 17), held))) == [("a", 0, 40)]
    parts = node("a", 15, 20, held=range(25, 40)), node("b", 15, 20.1, held=range(25))
    assert ranges(plan(request(*parts))) == [("b", 0, 25), ("a", 25, 40)]


def test_what_lies_on_a_disk_is_nearer_than_what_has_to_come_over_the_internet() -> None:
    made = plan(request(node("a", 22, 20), node("b", 22, 20, on_disk=frozenset(range(40)))))
    assert ranges(made) == [("b", 0, 40)]


def test_in_haste_nothing_is_loaded_for_a_little_speed_and_much_for_a_lot() -> None:
    held = node("a", 22, 30, held=range(20)), node("c", 22, 30, held=range(20, 40))
    made = plan(request(*held, node("quick", 22, 10), in_haste=True))
    assert ranges(made) == [("a", 0, 20), ("c", 20, 40)]
    assert "too much to load" in dict(made.left_out)["quick"]
    assert any("made in haste" in note for note in made.notes)
    made = plan(request(*held, node("quick", 22, 10), in_haste=False))
    assert ranges(made) == [("quick", 0, 40)]
    crawling = node("a", 22, 3000, held=range(20)), node("c", 22, 3000, held=range(20, 40))
    assert ranges(plan(request(*crawling, node("quick", 22, 10), in_haste=True))) == [("quick", 0, 40)]


def test_who_takes_the_place_of_a_machine_that_is_gone_moves_nobody_elses_layers() -> None:
    a, c = node("a", 4, 30, held=range(0, 10)), node("c", 9, 30, held=range(20, 40))
    for spare in (node("z", 9, 35), node("0", 9, 35)):
        assert ranges(plan(request(a, c, spare, in_haste=True))) == [
            ("a", 0, 10),
            (spare.node_id, 10, 20),
            ("c", 20, 40),
        ]


def test_the_same_machines_get_the_same_layers_after_a_restart() -> None:
    nodes = node("a", 7, 30), node("b", 7, 29), node("c", 7, 31)
    first = ranges(plan(request(*nodes)))
    held = {name: range(start, end) for name, start, end in first}
    again = [
        replace(each, on_disk=frozenset(held[each.node_id]), row_seconds=(x,) * 40)
        for each, x in zip(nodes, (29e-5, 30e-5, 29e-5), strict=True)
    ]
    assert ranges(plan(request(*reversed(again)))) == first


def test_without_speeds_as_few_machines_as_hold_the_model_are_used_those_with_the_most_memory() -> None:
    made = plan(request(node("a", 9), node("b", 60), node("c", 22)))
    assert ranges(made) == [("b", 0, 40)]
    assert dict(made.left_out) == dict.fromkeys("ac", "spare: the model fits without it")
    assert made.notes == (
        "How fast these machines are is not known yet: as few as hold the model are used, those with the most memory.",
    )
    assert ranges(plan(request(node("a", 6), node("b", 12)))) == [("a", 0, 13), ("b", 13, 40)]


def test_a_machine_whose_speed_is_not_known_counts_like_the_others() -> None:
    made = plan(request(node("new", 12), node("a", 5, 40), node("b", 5, 40)))
    assert "new" in {stage.node_id for stage in made.stages}
    assert any("How fast new computes is not known yet" in note for note in made.notes)


def test_notes_name_what_limits_it_and_what_would_help() -> None:
    wires = {(COORDINATOR, "mac"): RADIO, (COORDINATOR, "pc"): CABLE}
    notes = plan(request(node("mac", 8, 90), node("pc", 12, 31), wires=wires)).notes
    assert notes[0].startswith("One answer alone gets about")
    told = " ".join(notes)
    assert "The weakest connection is that of" in told
    assert "With a gigabit cable there" in told
    assert "Each of them is needed: without any one of them the model does not fit." in told
    assert "with 4.00 GB more, pc could hold the model alone" in told
    assert "One more gigabyte on pc would save" in told


def test_the_coordinators_own_part_of_a_token_counts_if_it_is_known() -> None:
    wires = {(COORDINATOR, "pc"): Wire(0.0), (COORDINATOR, "far"): Wire(0.005)}
    asked = request(node("pc", 22, 20), node("far", 22, 20), wires=wires)
    made = plan(asked)
    assert made.notes[0].endswith("and 0.00 ms between them, without what the coordinator itself takes.")
    made = plan(replace(asked, head_seconds=0.03))
    assert made.notes[0].startswith("One answer alone gets about 20 tokens a second")
    assert made.notes[0].endswith("20 ms of it in the machines, 0.00 ms between them and 30 ms in the coordinator.")
    assert "(60 ms instead of 50 ms)" in dict(made.left_out)["far"]


def test_a_promise_by_estimated_times_is_told_to_be_one() -> None:
    measured, estimated = (node("pc", 22, 20, estimated=each) for each in (False, True))
    assert not any("estimated" in note for note in plan(request(measured)).notes)
    estimated = replace(estimated, chunk_seconds=(0.01,) * 40)
    notes = plan(request(estimated, node("far", 22, 90), prompt_rows=2.0)).notes
    assert notes[0].startswith("One answer alone gets at most")
    assert notes[1].startswith("A question of 750 words is read in no less than")
    assert any(note.startswith("How long these layers take on pc was not measured yet") for note in notes)


def test_no_cable_is_advised_within_a_machine() -> None:
    for within, count in ((False, 1), (True, 0)):
        wire = Wire(0.005, within_machine=within)
        asked = request(node("a", 9, 20), node("b", 9, 20), wires={(COORDINATOR, "a"): wire, (COORDINATOR, "b"): wire})
        assert [note.count("With a gigabit cable") for note in plan(asked).notes if "weakest" in note] == [count]


def test_more_memory_where_there_is_enough_saves_nothing_of_connections_that_are_not_known() -> None:
    wires = {("mac", "pc"): Wire(0.0045, 12.5e6)}
    made = plan(request(node("mac", 16, 90), node("pc", 24, 31), wires=wires))
    assert ranges(made) == [("pc", 0, 40)]
    assert not any("One more gigabyte" in note for note in made.notes)


def test_a_model_that_does_not_fit_tells_what_is_missing() -> None:
    with pytest.raises(PlanError, match="the model does not fit") as refused:
        plan(request(node("a", 5, 10), node("b", 5, 10)))
    assert refused.value.missing_bytes == 6 * GB + GB * 4 // 10


def test_a_machine_too_small_for_a_layer_is_told_so() -> None:
    assert "too small" in dict(plan(request(node("a", 22, 10), node("b", 0.1, 10))).left_out)["b"]
