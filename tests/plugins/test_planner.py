from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from core_plugin_planner.balanced import BalancedPlanner

from core import Candidate, Plan, PlanError, PlanRequest
from core.plugins import PluginHost

GB = 10**9


def request(
    layer_bytes: list[int], memories: list[int], min_stages: int = 1, max_stages: int | None = None
) -> PlanRequest:
    candidates = tuple(Candidate(f"node{i}", memory, "cpu") for i, memory in enumerate(memories))
    return PlanRequest(tuple(layer_bytes), candidates, min_stages, max_stages)


def plan(layer_bytes: list[int], memories: list[int], min_stages: int = 1, max_stages: int | None = None) -> Plan:
    return BalancedPlanner().plan(request(layer_bytes, memories, min_stages, max_stages))


def refused(
    layer_bytes: list[int], memories: list[int], min_stages: int = 1, max_stages: int | None = None
) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan(layer_bytes, memories, min_stages, max_stages)
    return caught.value


def ranges(made: Plan) -> list[tuple[str, int, int]]:
    return [(stage.node_id, stage.start, stage.end) for stage in made.stages]


def by_brute_force(asked: PlanRequest) -> tuple[tuple[int, ...], list[float]] | None:
    """The best nodes, and the fills of the best split among them, fullest first, by trying all."""
    layers, memories = asked.layer_bytes, [node.memory for node in asked.candidates]
    most = len(layers) if asked.max_stages is None else asked.max_stages
    for count in range(asked.min_stages, min(most, len(memories), len(layers)) + 1):
        fitting = []
        for nodes in combinations(range(len(memories)), count):
            for inner in combinations(range(1, len(layers)), count - 1):
                sizes = [sum(layers[a:b]) for a, b in pairwise((0, *inner, len(layers)))]
                offers = [memories[node] for node in nodes]
                if all(size <= offer for size, offer in zip(sizes, offers, strict=True)):
                    fills = sorted((size / offer for size, offer in zip(sizes, offers, strict=True)), reverse=True)
                    fitting.append((-sum(offers), nodes, fills))
        if fitting:
            _, nodes, fills = min(fitting)
            return nodes, fills
    return None


def random_request(rng: random.Random) -> PlanRequest:
    layers = [rng.choice((1, 3, 5, rng.randint(1, 12))) for _ in range(rng.randint(1, 7))]
    memories = [rng.randint(0, 16) for _ in range(rng.randint(1, 5))]
    min_stages = rng.randint(1, min(3, len(layers), len(memories)))
    return request(layers, memories, min_stages, rng.choice((None, rng.randint(min_stages, 6))))


def test_any_small_case_is_planned_as_by_trying_all() -> None:
    rng = random.Random(0)
    fitted = 0
    for _ in range(1500):
        asked = random_request(rng)
        expected = by_brute_force(asked)
        if expected is None:
            with pytest.raises(PlanError):
                BalancedPlanner().plan(asked)
            continue
        fitted += 1
        made = BalancedPlanner().plan(asked)
        offers = {node.node_id: node.memory for node in asked.candidates}
        fills = sorted((stage.nbytes / offers[stage.node_id] for stage in made.stages), reverse=True)
        assert (tuple(int(stage.node_id[4:]) for stage in made.stages), fills) == expected
        assert [layer for s in made.stages for layer in range(s.start, s.end)] == [*range(len(asked.layer_bytes))]
        assert all(s.nbytes == sum(asked.layer_bytes[s.start : s.end]) for s in made.stages)
        assert {name for name, _ in made.left_out} == offers.keys() - {s.node_id for s in made.stages}
    assert 300 < fitted < 1200


def test_one_more_node_with_the_missing_bytes_would_do_and_with_a_byte_less_would_not() -> None:
    rng = random.Random(1)
    failed = 0
    for _ in range(800):
        asked = random_request(rng)
        layers, memories = [*asked.layer_bytes], [node.memory for node in asked.candidates]
        if by_brute_force(request(layers, memories, 1, asked.max_stages)) is None:
            failed += 1
            missing = refused(layers, memories, 1, asked.max_stages).missing_bytes
            assert missing > 0
            assert plan(layers, [*memories, missing], 1, asked.max_stages)
            refused(layers, [*memories, missing - 1], 1, asked.max_stages)
    assert failed > 100


def test_the_planner_comes_as_a_plugin() -> None:
    import core_plugin_planner

    host = PluginHost()
    host.register(core_plugin_planner, "planner")
    assert isinstance(host.planners.get("balanced"), BalancedPlanner)


def test_a_model_that_fits_one_node_goes_to_the_one_with_the_most_memory() -> None:
    made = plan([GB] * 4, [5 * GB, 9 * GB, 9 * GB])
    assert ranges(made) == [("node1", 0, 4)]
    assert dict(made.left_out) == dict.fromkeys(("node0", "node2"), "spare: the model fits without it")


def test_stages_follow_the_order_of_joining_and_share_in_proportion_to_memory() -> None:
    assert ranges(plan([GB] * 12, [4 * GB, 8 * GB, 2 * GB])) == [("node0", 0, 4), ("node1", 4, 12)]
    assert ranges(plan([GB] * 9, [40 * GB, 80 * GB, 20 * GB], 2)) == [("node0", 0, 3), ("node1", 3, 9)]


def test_also_the_nodes_that_are_not_the_fullest_are_balanced() -> None:
    made = plan([1, 1, 1, 1, 100], [200, 200, 200], 3)
    assert [stage.nbytes for stage in made.stages] == [2, 2, 100]


def test_a_split_is_found_that_filling_each_node_in_turn_would_miss() -> None:
    assert ranges(plan([1, 10], [2, 10, 3], 2)) == [("node0", 0, 1), ("node1", 1, 2)]
    assert ranges(plan([2, 2, 3], [4, 5], 2)) == [("node0", 0, 1), ("node1", 1, 3)]


def test_as_many_nodes_as_asked_for_are_used() -> None:
    made = plan([GB] * 4, [9 * GB] * 4, 3)
    assert [stage.node_id for stage in made.stages] == ["node0", "node1", "node2"]


def test_each_unused_node_has_its_reason() -> None:
    made = plan([GB] * 4, [9 * GB, GB // 2, 4 * GB, 8 * GB], 1)
    assert made.left_out == (
        ("node1", "too small: even one layer takes 1.00 GB and it offers 0.50 GB"),
        ("node2", "spare: the model fits without it"),
        ("node3", "spare: the model fits without it"),
    )
    made = plan([GB] * 4, [9 * GB, GB // 2, 4 * GB], 1, 1)
    assert dict(made.left_out)["node2"] == "the highest number of nodes that may be used is reached without it"


def test_a_model_that_does_not_fit_tells_the_numbers() -> None:
    error = refused([GB] * 10, [3 * GB, 4 * GB + 999])
    assert error.missing_bytes == 3 * GB
    assert "take 10.00 GB, and 2 nodes offer 7.00 GB in all" in error.message
    assert "add 1 node with 3.00 GB to offer" in error.hint


def test_whole_layers_that_do_not_fit_into_enough_memory_still_miss_some() -> None:
    assert refused([3 * GB] * 3, [5 * GB, 5 * GB]).missing_bytes == 3 * GB


def test_the_limit_of_nodes_is_told_where_it_is_why_the_model_does_not_fit() -> None:
    error = refused([GB] * 4, [2 * GB, 2 * GB, 2 * GB], 1, 1)
    assert error.missing_bytes == 4 * GB
    assert "at most 1 may be used" in error.message


def test_nodes_too_small_for_a_layer_do_not_count_towards_the_nodes_asked_for() -> None:
    error = refused([GB] * 4, [9 * GB, 1, 1], 3)
    assert error.missing_bytes == 2 * GB
    assert "3 or more must each hold a layer" in error.message
    assert "add 2 nodes with 2.00 GB to offer" in error.hint
    assert ranges(plan([GB] * 4, [9 * GB, 1, 1, GB, GB], 3)) == [("node0", 0, 2), ("node3", 2, 3), ("node4", 3, 4)]


@pytest.mark.parametrize(
    ("layers", "nodes", "min_stages", "max_stages", "told"),
    [
        (4, 2, 3, None, "3 nodes needed, 2 there"),
        (4, 0, 1, None, "1 node needed, 0 there"),
        (2, 5, 3, None, "3 nodes are asked for, each holds at least one layer, and there are 2"),
        (4, 5, 3, 2, "at least 3 and at most 2 are asked for"),
    ],
)
def test_numbers_of_nodes_that_cannot_be_are_refused(
    layers: int, nodes: int, min_stages: int, max_stages: int | None, told: str
) -> None:
    assert told in refused([GB] * layers, [9 * GB] * nodes, min_stages, max_stages).message
