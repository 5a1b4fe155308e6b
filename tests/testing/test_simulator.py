"""The simulator keeps its promises: times add up, faults are survived by the real coordinator, seeds decide."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from core.coordinator import route
from core.errors import ConfigError, CoreError
from core.testing.simulator import (
    Coordinator,
    Description,
    Event,
    Happening,
    Link,
    Load,
    Machine,
    Model,
    Report,
    Wire,
    simulate,
)
from core.testing.simulator.description import milliseconds

EXAMPLES = Path(__file__).resolve().parents[2] / "benchmarks" / "simulated"
MODEL = Model(layers=12, layer_mb=100, kv_kb=1, hidden_size=1000)
PC = Machine(name="pc", count=3, memory_gb=0.7, layer_ms=((1, 1.0), (9, 2.0)), message_ms=0.0, load_mb_per_s=100)
FAR = Wire(delay_ms=10)
ONE = Load(streams=1, prompt=(20, 20), answer=(100, 100))


def described(*loads: Load, **more: Any) -> Description:
    """Two of three machines hold the model, and are 10 ms from each other and from the coordinator."""
    head = Coordinator(head_ms=((1, 2.0),), message_ms=0.0)
    fields: dict[str, Any] = {"machines": (PC,), "coordinator": head, "wires": FAR, "settings": {"min_nodes": 2}}
    return Description(model=MODEL, load=loads or (ONE,), **{**fields, **more})


def happens(at: float, what: Happening, machine: str | int = 0, **more: float) -> Event:
    return Event(at=at, what=what, machine=machine, **more)


@pytest.fixture(scope="module")
def undisturbed() -> Report:
    return simulate(described())


def test_caches_and_other_programs_cost_what_is_said_of_them() -> None:
    plain = PC.layer_seconds(4)
    machine = msgspec.structs.replace(PC, context_ms=1.0, cache_ms=3.0)
    assert machine.layer_seconds(4, context=4000, cached=1000) == pytest.approx(plain + 0.004 + 0.003)
    shared = msgspec.structs.replace(PC, scatter=(2.0, 2.0))
    slow, quick = (simulate(described(machines=(each,))) for each in (shared, PC))
    assert slow.busy["pc-1"] > quick.busy["pc-1"]
    assert slow.streams[0].rate == pytest.approx(1 / (3 * 0.010 + 12 * 0.002 + 0.002), rel=0.01)


def test_a_token_takes_what_wires_stages_and_head_take(undisturbed: Report) -> None:
    [stream] = undisturbed.streams
    assert len(undisturbed.layers) == 2
    assert stream.rate == pytest.approx(1 / (3 * 0.010 + 12 * 0.001 + 0.002), rel=0.01)
    assert [undisturbed.busy[name] for name in undisturbed.layers] == pytest.approx([6 / 44, 6 / 44], rel=0.05)
    assert undisturbed.busy["coordinator"] == pytest.approx(2 / 44, rel=0.05)


def test_several_streams_share_the_delays_of_the_wires(undisturbed: Report) -> None:
    four = simulate(described(replace_load(ONE, streams=4)))
    assert 3.5 < four.steady_throughput / undisturbed.steady_throughput <= 4


def test_a_description_brings_one_report_and_another_seed_another() -> None:
    load, events = Load(streams=4, prompt=(5, 50), answer=(20, 50)), (happens(0.5, Happening.DIES),)
    jittery = described(load, events=events, wires=Wire(delay_ms=10, jitter_ms=5))
    first, again, other = (simulate(msgspec.structs.replace(jittery, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert [stream.tokens for stream in first.streams] != [stream.tokens for stream in other.streams]


def test_bytes_take_their_time_on_a_wire() -> None:
    prompt = Load(streams=1, prompt=(200, 200), answer=(2, 2))
    wide, narrow = (simulate(described(prompt, wires=Wire(delay_ms=10, mbit=mbit))) for mbit in (0.0, 8.0))
    hidden = 200 * 1000 * 2
    assert narrow.streams[0].ttft - wide.streams[0].ttft == pytest.approx(2 * hidden * 8e-6 / 8, rel=0.05)


@pytest.mark.parametrize(
    ("what", "silent"), [(Happening.DIES, False), (Happening.VANISHES, True)], ids=["dies", "vanishes"]
)
def test_answers_outlive_a_machine(undisturbed: Report, what: Happening, silent: bool) -> None:
    report = simulate(described(replace_load(ONE, streams=2), events=(happens(1, what),)))
    assert report.failed == []
    assert len({*report.layers, *undisturbed.layers}) == 3
    assert (report.routes, report.recoveries) == (2, 2)
    assert [stream.recoveries for stream in report.streams] == [1, 1]
    load, unnoticed = 6, report.streams[0].longest_gap - report.outage_seconds / 2
    assert load < report.outage_seconds / 2 < load + 2
    assert (unnoticed > 2) == silent


def test_a_machine_that_stands_in_has_the_layers_or_makes_room_for_them() -> None:
    settings, events = {"min_nodes": 2, "standby": True}, (happens(20, Happening.DIES, 0),)
    load = replace_load(ONE, answer=(600, 600))
    both = [simulate(described(load, settings=settings, events=events, seed=seed)) for seed in range(3)]
    assert [report.failed for report in both] == [[], [], []]
    assert min(report.streams[0].longest_gap for report in both) < 3


@pytest.mark.parametrize("what", [Happening.LEAVES, Happening.PAUSES])
def test_a_machine_that_takes_its_leave_holds_nobody_up(undisturbed: Report, what: Happening) -> None:
    report = simulate(described(replace_load(ONE, answer=(250, 250)), events=(happens(1, what),)))
    assert report.failed == []
    assert len({*report.layers, *undisturbed.layers}) == 3
    assert report.recoveries == 0
    assert report.streams[0].longest_gap < 0.5


def test_without_a_machine_to_spare_answers_wait_until_one_returns() -> None:
    two = msgspec.structs.replace(PC, count=2)
    [back] = [happens(4, Happening.RETURNS, "pc-1")]
    events = (happens(1, Happening.DIES, "pc-1"), back)
    report = simulate(described(machines=(two,), events=events))
    assert report.failed == []
    assert report.streams[0].longest_gap > 3 + 6
    given_up = simulate(described(machines=(two,), events=events[:1], settings={"min_nodes": 2, "recovery_time": 5}))
    assert len(given_up.failed) == 1
    assert "pc-1" in given_up.failed[0].error


def test_a_machine_that_slows_down_slows_its_layers(undisturbed: Report) -> None:
    report = simulate(described(events=(happens(0, Happening.SLOWS, factor=3),)))
    assert 1 / report.streams[0].rate - 1 / undisturbed.streams[0].rate == pytest.approx(2 * 0.006, rel=0.05)


def test_who_joins_later_takes_part() -> None:
    late = Machine(name="late", memory_gb=0.7, layer_ms=((1, 1.0),), joins=2.0)
    pair = msgspec.structs.replace(PC, count=2)
    report = simulate(described(machines=(pair, late), events=(happens(3, Happening.DIES, "pc-1"),)))
    assert report.failed == []
    assert "late" in report.layers


def test_a_chats_second_turn_finds_its_first_in_the_caches() -> None:
    chat = Load(streams=1, turns=2, prompt=(400, 400), follow_up=(10, 10), answer=(5, 5))
    first, second = simulate(described(chat)).streams
    assert second.prompt_tokens == 415
    assert second.ttft < 0.3 * first.ttft


def test_visitors_come_at_random_moments_as_often_as_is_said() -> None:
    report = simulate(described(Load(per_minute=120, seconds=20, prompt=(5, 5), answer=(2, 2))))
    assert 25 <= len(report.streams) <= 60
    assert report.failed == []
    assert len({stream.client for stream in report.streams}) == len(report.streams)


def test_a_site_is_joined_by_its_own_network_and_to_others_by_links() -> None:
    home, away = (msgspec.structs.replace(PC, name=site, count=1, site=site) for site in ("home", "away"))
    link = Link(between=("home", "away"), delay_ms=7)
    description = described(machines=(home, away), links=(link,), coordinator=Coordinator(site="at-home"))
    assert description.wire("home", "away") is description.wire("away", "home") is link
    assert description.wire("coordinator", "home") is description.wires
    near = msgspec.structs.replace(description, coordinator=Coordinator(site="home"))
    assert near.wire("coordinator", "home") is near.lan
    assert near.wire("coordinator", "away") is link


def test_a_cluster_that_is_too_small_says_what_is_missing() -> None:
    with pytest.raises(CoreError, match="does not fit"):
        simulate(described(machines=(msgspec.structs.replace(PC, memory_gb=0.3),), limit=30))


def test_time_is_the_real_one_again_afterwards(undisturbed: Report) -> None:
    assert route.time is time
    assert trio.to_thread.run_sync.__module__.startswith("trio")


def test_times_grow_evenly_between_what_is_said() -> None:
    times = ((1, 1.0), (9, 2.0), (11, 4.0))
    assert [milliseconds(times, rows) for rows in (0, 1, 5, 9, 10, 13)] == [1, 1, 1.5, 2, 3, 6]
    assert [milliseconds(((4, 2.0),), rows) for rows in (1, 4, 8)] == [2, 2, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[load]]\nstreams = 1", "machines"),
        ("speed = 3", "speed"),
        ('[[events]]\nat = 1\nmachine = "tv"\nwhat = "dies"', "tv"),
        ("machines = 3", "machines"),
    ],
)
def test_what_describes_no_cluster_is_refused_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    whole = "" if "machines" in said else '[[machines]]\nname = "pc"\nmemory_gb = 1\nlayer_ms = [[1, 1.0]]\n'
    loads = "" if "[[load]]" in text else "[[load]]\nstreams = 1\n"
    top, tables = (text, "") if text[0] != "[" else ("", text)
    file = tmp_path / "cluster.toml"
    file.write_text(f"{top}\n[model]\nlayers = 4\nlayer_mb = 10\n{whole}{loads}{tables}")
    with pytest.raises(ConfigError, match=said):
        Description.read(file)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_describe_clusters(path: Path) -> None:
    assert Description.read(path).title


def replace_load(load: Load, **changes: Any) -> Load:
    return msgspec.structs.replace(load, **changes)
