"""Plans in haste load the fewest bytes, and all plans count what is pinned."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from core_plugin_planner import hasty
from core_plugin_planner.balanced import BalancedPlanner

from core import Candidate, Plan, PlanError, PlanRequest
from core.testing.contracts import PlannerContract

GB = 10**9


class TestBalanced(PlannerContract):
    @pytest.fixture
    def planner(self) -> BalancedPlanner:
        return BalancedPlanner()


def node(name: str, memory: int, held: range = range(0), pinned: range = range(0)) -> Candidate:
    return Candidate(name, memory, "cpu", held=frozenset(held), pinned=frozenset(pinned))


def in_haste(layers: int, *candidates: Candidate, min_stages: int = 1, max_stages: int | None = None) -> PlanRequest:
    """Layers that take 10 bytes, 8 of them weights."""
    return PlanRequest((10,) * layers, candidates, min_stages, max_stages, (8,) * layers, in_haste=True)


def ranges(request: PlanRequest) -> list[tuple[str, int, int]]:
    return [(stage.node_id, stage.start, stage.end) for stage in BalancedPlanner().plan(request).stages]


def taken(request: PlanRequest, index: int, start: int, end: int) -> int:
    kept, weights = request.candidates[index].pinned, request.weight_bytes
    return sum(request.layer_bytes[i] - (weights[i] if i in kept and weights else 0) for i in range(start, end))


def loaded(request: PlanRequest, index: int, start: int, end: int) -> int:
    weights = request.weight_bytes or request.layer_bytes
    return sum(weights[i] for i in range(start, end) if i not in request.candidates[index].held)


Stages = list[tuple[int, int, int]]


def all_that_fit(request: PlanRequest, *, any_order: bool) -> Iterator[tuple[Stages, list[float]]]:
    """Each way to lay the layers on nodes, and the fills, fullest first."""
    layers, there = len(request.layer_bytes), range(len(request.candidates))
    most = layers if request.max_stages is None else min(request.max_stages, layers)
    for count in range(request.min_stages, min(most, len(there)) + 1):
        for inner in combinations(range(1, layers), count - 1):
            cuts = [*pairwise((0, *inner, layers))]
            for order in permutations(there, count) if any_order else combinations(there, count):
                stages = [(index, *cut) for index, cut in zip(order, cuts, strict=True)]
                sizes = [(taken(request, *stage), request.candidates[stage[0]].memory) for stage in stages]
                if all(size <= memory for size, memory in sizes):
                    yield stages, sorted((size / memory for size, memory in sizes), reverse=True)


def best_in_haste(request: PlanRequest) -> Stages | None:
    keys = (
        (
            sum(loaded(request, *stage) for stage in stages),
            len(stages),
            fills,
            sorted((index for index, _, _ in stages), reverse=True),
            [(index, end) for index, _, end in stages],
            stages,
        )
        for stages, fills in all_that_fit(request, any_order=True)
    )
    return min(keys, default=(None,))[-1]


def best_with_time(request: PlanRequest) -> Stages | None:
    keys = (
        (
            len(stages),
            -sum(request.candidates[index].memory for index, _, _ in stages),
            [index for index, _, _ in stages],
            fills,
            [start for _, start, _ in stages],
            stages,
        )
        for stages, fills in all_that_fit(request, any_order=False)
    )
    return min(keys, default=(None,))[-1]


def random_request(rng: random.Random, *, haste: bool) -> PlanRequest:
    layers = rng.randint(1, 8)
    weights = [rng.choice((3, rng.randint(1, 9))) for _ in range(layers)]
    sizes = [weight + rng.choice((1, 1, rng.randint(0, 4))) for weight in weights]

    def some() -> frozenset[int]:
        kind, start = rng.random(), rng.randrange(layers)
        if kind < 0.35:
            return frozenset()
        if kind < 0.85:
            return frozenset(range(start, rng.randint(start, layers) + 1))
        return frozenset(rng.sample(range(layers + 1), rng.randint(1, layers)))

    candidates = []
    for index in range(rng.randint(1, 4)):
        held = some()
        pinned = frozenset(layer for layer in held if rng.random() < 0.8) if rng.random() < 0.3 else frozenset()
        memory = rng.choice((12, 20, rng.randint(1, 40)))
        candidates.append(Candidate(f"node{index}", memory, "cpu", held=held, pinned=pinned))
    fewest = rng.randint(1, min(rng.choice((1, 1, 3)), layers, len(candidates)))
    most = rng.choice((None, None, rng.randint(fewest, 4)))
    known = () if rng.random() < 0.1 else tuple(weights)
    return PlanRequest(tuple(sizes), tuple(candidates), fewest, most, known, haste)


def as_indices(plan: Plan) -> Stages:
    return [(int(stage.node_id[4:]), stage.start, stage.end) for stage in plan.stages]


@pytest.mark.parametrize("haste", [True, False])
def test_any_small_case_is_planned_as_by_trying_all(haste: bool) -> None:
    rng = random.Random(2)
    fitted = 0
    for _ in range(700):
        request = random_request(rng, haste=haste)
        something_held = any(layer < len(request.layer_bytes) for each in request.candidates for layer in each.held)
        expected = best_in_haste(request) if haste and something_held else best_with_time(request)
        if expected is None:
            with pytest.raises(PlanError):
                BalancedPlanner().plan(request)
            continue
        fitted += 1
        made = BalancedPlanner().plan(request)
        assert as_indices(made) == expected, request
        assert [stage.nbytes for stage in made.stages] == [taken(request, *stage) for stage in expected]
        assert BalancedPlanner().plan(request) == made
    assert 250 < fitted < 650


def test_the_layers_of_a_node_that_is_gone_go_to_the_spare_one_and_nothing_else_is_loaded() -> None:
    nodes = node("a", 120, range(0, 10)), node("c", 120, range(20, 30)), node("d", 110)
    assert ranges(in_haste(30, *nodes)) == [("a", 0, 10), ("d", 10, 20), ("c", 20, 30)]


def test_without_a_spare_node_its_neighbours_share_them_and_the_fullest_is_least_full() -> None:
    nodes = node("c", 160, range(20, 30)), node("a", 160, range(0, 10))
    assert ranges(in_haste(30, *nodes)) == [("a", 0, 15), ("c", 15, 30)]


def test_where_nothing_is_held_haste_changes_nothing() -> None:
    rng = random.Random(3)
    for _ in range(300):
        request = random_request(rng, haste=False)
        empty = tuple(replace(each, held=frozenset(), pinned=frozenset()) for each in request.candidates)
        request = replace(request, candidates=empty)
        try:
            expected = BalancedPlanner().plan(request)
        except PlanError as refused:
            with pytest.raises(PlanError) as caught:
                BalancedPlanner().plan(replace(request, in_haste=True))
            assert str(caught.value) == str(refused)
        else:
            assert BalancedPlanner().plan(replace(request, in_haste=True)) == expected


def test_what_is_held_does_not_change_a_plan_without_haste() -> None:
    rng = random.Random(4)
    for _ in range(300):
        request = random_request(rng, haste=False)
        kept = tuple(replace(each, pinned=frozenset()) for each in request.candidates)
        empty = tuple(replace(each, held=frozenset()) for each in kept)
        plans = []
        for candidates in (kept, empty):
            try:
                plans.append(BalancedPlanner().plan(replace(request, candidates=candidates)))
            except PlanError as refused:
                plans.append(str(refused))
        assert plans[0] == plans[1]


def test_of_plans_that_load_as_much_the_one_with_the_fewest_stages_is_taken() -> None:
    nodes = node("a", 100, range(0, 10)), node("b", 50), node("c", 60), node("d", 100)
    assert ranges(in_haste(20, *nodes)) == [("a", 0, 10), ("d", 10, 20)]
    assert len(ranges(in_haste(20, *nodes, min_stages=3))) == 3


def test_a_large_cluster_loads_the_layers_of_the_node_that_is_gone_alone() -> None:
    """With the search among all orders, and with the one that keeps an order, whichever order they joined in."""
    route = [node(f"n{i}", 80 + i, range(6 * i, 6 * i + 6)) for i in range(16) if i != 9]
    route[-1] = replace(route[-1], memory=160, held=frozenset(range(90, 100)))
    nodes = [*route, *(node(f"s{i}", 61 + i) for i in range(3))]
    random.Random(5).shuffle(nodes)
    request, index = in_haste(100, *nodes), {each.node_id: index for index, each in enumerate(nodes)}
    for steps in (hasty.STEPS, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hasty, "STEPS", steps)
            made = ranges(request)
        names = [f"n{i}" for i in range(16)]
        names[9] = "s2"
        assert [name for name, _, _ in made] == names
        assert sum(loaded(request, index[name], start, end) for name, start, end in made) == 6 * 8


def test_a_search_that_is_given_up_leaves_a_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    best = worse = 0
    for _ in range(300):
        request = random_request(rng, haste=True)
        if (expected := best_in_haste(request)) is None:
            continue
        monkeypatch.setattr(hasty, "STEPS", 0)
        try:
            stages = as_indices(BalancedPlanner().plan(request))
        except PlanError:
            continue
        assert all(taken(request, *stage) <= request.candidates[stage[0]].memory for stage in stages)
        bytes_loaded = [sum(loaded(request, *stage) for stage in each) for each in (stages, expected)]
        best, worse = best + (bytes_loaded[0] == bytes_loaded[1]), worse + (bytes_loaded[0] > bytes_loaded[1])
    assert best > 3 * worse > 0


@pytest.mark.parametrize("haste", [True, False])
def test_a_pinned_layer_takes_what_its_cache_takes(haste: bool) -> None:
    request = replace(in_haste(10, node("a", 60, range(0, 5), range(0, 5))), in_haste=haste)
    made = BalancedPlanner().plan(request)
    assert [(stage.node_id, stage.nbytes) for stage in made.stages] == [("a", 60)]
    with pytest.raises(PlanError) as caught:
        BalancedPlanner().plan(replace(request, candidates=(replace(request.candidates[0], memory=59),)))
    assert caught.value.missing_bytes == 10
    with pytest.raises(PlanError):
        BalancedPlanner().plan(replace(request, weight_bytes=()))


def test_one_more_node_with_the_missing_bytes_would_do_also_where_layers_are_pinned() -> None:
    rng = random.Random(7)
    failed = 0
    for _ in range(600):
        request = replace(random_request(rng, haste=False), min_stages=1)
        try:
            BalancedPlanner().plan(request)
        except PlanError as refused:
            failed += 1
            missing = refused.missing_bytes
            assert missing > 0
            for haste in (False, True):
                more = (*request.candidates, Candidate("more", missing, "cpu"))
                assert BalancedPlanner().plan(replace(request, candidates=more, in_haste=haste))
            less = (*request.candidates, Candidate("more", missing - 1, "cpu"))
            with pytest.raises(PlanError):
                BalancedPlanner().plan(replace(request, candidates=less))
    assert failed > 100


def test_the_weights_that_are_pinned_are_told_beside_what_is_offered() -> None:
    pins = node("a", 3 * GB, range(0, 2), range(0, 2))
    request = PlanRequest((GB,) * 10, (pins, node("b", 4 * GB)), weight_bytes=(GB * 9 // 10,) * 10)
    with pytest.raises(PlanError) as caught:
        BalancedPlanner().plan(request)
    told = "its layers take 10.00 GB, and 2 nodes offer 7.00 GB in all, beside 1.80 GB of their weights that are held"
    assert told in caught.value.message
    assert caught.value.missing_bytes == 2 * GB
    with pytest.raises(PlanError) as caught:
        BalancedPlanner().plan(replace(request, min_stages=3))
    assert caught.value.missing_bytes == 3 * GB - GB * 18 // 10


def test_a_node_that_pins_a_layer_is_not_too_small_where_the_cache_fits() -> None:
    nodes = node("a", 100), node("b", 2, range(0, 3), range(0, 3)), node("c", 2)
    made = dict(BalancedPlanner().plan(replace(in_haste(10, *nodes), in_haste=False)).left_out)
    assert made["b"] == "spare: the model fits without it"
    assert made["c"].startswith("too small")
