"""What members say of their speed, held to what can be and to what serving shows; and when they have drifted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest

from core.coordinator import drift as drifts
from core.coordinator import excess as excesses
from core.coordinator.drift import HOLD_SECONDS, Drift, Pace
from core.coordinator.excess import FORGIVE_SECONDS, Excess
from core.coordinator.hop import DIRECT, Hop
from core.coordinator.members import Member, Members
from core.coordinator.route import Route
from core.coordinator.speeds import MAX_READ_SPEED, MAX_SECONDS, Speeds
from core.coordinator.token_times import MIN_STEPS, STEPS, TokenTimes
from core.coordinator.wires import MAX_PAIRS, MESSAGE_SECONDS, Wires
from core.interfaces.planner import COORDINATOR, Wire
from core.link import Link
from core.protocol.fields import LayerTime, PeerLink
from core.protocol.messages import PROTOCOL_VERSION, Hello, NodeState
from core.runtime.layer_costs import KIND_BYTES, LayerCost
from core.runtime.model import Precision

DENSE, MIXED = LayerCost(b"d" * KIND_BYTES, 10**6), LayerCost(b"m" * KIND_BYTES, 3 * 10**6)
SPEEDS = Speeds((DENSE, MIXED, DENSE, DENSE))
MS = 10**6


class FakeLink:
    def __init__(self, round_trip: float | None, bandwidth: float) -> None:
        self.typical_round_trip, self.bandwidth = round_trip, bandwidth
        self.within_this_machine = False


def member(node_id: str = "a", *, round_trip: float | None = None, bandwidth: float = 0.0, **hello: Any) -> Member:
    return Member(Hello(PROTOCOL_VERSION, node_id, **hello), cast(Link, FakeLink(round_trip, bandwidth)))


def timed(row_ns: int, chunk_ns: int = 0, kind: bytes = DENSE.kind) -> list[LayerTime]:
    return [LayerTime(kind, row_ns, chunk_ns)]


def hops(*members: Member) -> list[Hop]:
    """Of two layers each."""
    precision = cast(Precision, None)
    return [Hop(number, each, range(2 * number, 2 * number + 2), precision) for number, each in enumerate(members)]


def of_one_kind(layers: int) -> Speeds:
    return Speeds((DENSE,) * layers)


def test_timed_layers_take_what_was_timed_and_others_as_long_for_a_byte() -> None:
    one = member(layer_times=timed(2 * MS, 40 * MS), speed=1)
    assert SPEEDS.row_seconds(one) == pytest.approx((0.002, 0.006, 0.002, 0.002))
    assert SPEEDS.chunk_seconds(one) == pytest.approx((0.04, 0.12, 0.04, 0.04))
    assert SPEEDS.timed(one, range(2, 4)) == pytest.approx(0.004)
    assert SPEEDS.timed(one, range(1, 4)) == 0.0, "no layer of the other kind was timed"


def test_times_are_estimated_if_the_member_timed_none_of_the_layers() -> None:
    assert not SPEEDS.estimated(member(layer_times=timed(2 * MS), speed=1))
    assert SPEEDS.estimated(member(layer_times=timed(2 * MS, kind=b"o" * KIND_BYTES), speed=1))
    assert SPEEDS.estimated(member(speed=1))
    assert not SPEEDS.estimated(member()), "it is not known at all"


def test_a_chunk_takes_no_less_than_a_row() -> None:
    """Whatever a node says of it, or is seen to take."""
    one = member(layer_times=timed(2 * MS, 1))
    assert SPEEDS.chunk_seconds(one) == SPEEDS.row_seconds(one)
    one.excess = 1e-8
    assert SPEEDS.chunk_seconds(one) == SPEEDS.row_seconds(one)


def test_before_that_a_speed_stands_in() -> None:
    one = member(speed=10**9, chunk_speed=10**8)
    assert SPEEDS.row_seconds(one) == pytest.approx((0.001, 0.003, 0.001, 0.001))
    assert SPEEDS.chunk_seconds(one) == pytest.approx((0.01, 0.03, 0.01, 0.01))
    assert SPEEDS.row_seconds(member()) == SPEEDS.chunk_seconds(member()) == ()


def test_what_serving_shows_takes_the_place_of_what_was_said_first() -> None:
    one = member(layer_times=timed(2 * MS))
    one.reported = NodeState(0, 0, 0, 0, layer_times=timed(5 * MS))
    assert SPEEDS.row_seconds(one)[0] == pytest.approx(0.005)


@pytest.mark.parametrize("ns", [1, 2**62])
def test_no_layer_takes_less_or_more_than_can_be(ns: int) -> None:
    for seconds in SPEEDS.row_seconds(member(layer_times=timed(ns))):
        assert 10**6 / MAX_READ_SPEED <= seconds <= MAX_SECONDS
    for seconds in SPEEDS.row_seconds(member(speed=ns)):
        assert 10**6 / MAX_READ_SPEED <= seconds <= MAX_SECONDS


def hold(excess: Excess, route: list[Hop], measured: float, predicted: Callable[[], float]) -> list[bool]:
    """What it says of a token that goes on taking so long, each second of a minute."""
    return [excess.note(route, measured, predicted(), float(second)) for second in range(61)]


def test_who_claims_to_be_infinitely_fast_pays_for_what_a_token_takes() -> None:
    """An honest node takes 20 ms; the liar says nothing, and takes 80."""
    speeds, honest, liar = of_one_kind(4), member("honest", layer_times=timed(10 * MS)), member("liar")
    liar.reported = NodeState(0, 0, 0, 0, layer_times=timed(1))
    route = hops(liar, honest)

    def predicted() -> float:
        return sum(sum(speeds.row_seconds(hop.member)[:2]) for hop in route)

    found = hold(Excess(speeds), route, 0.1, predicted)
    assert found.count(True) == 1, "once it is explained there is nothing to correct"
    assert sum(speeds.row_seconds(liar)[:2]) == pytest.approx(0.08)
    assert honest.excess == 0.0


def test_who_was_wrongly_doubted_is_believed_again_when_it_is_seen_to_be_fast() -> None:
    speeds, one = of_one_kind(2), member("a", layer_times=timed(10 * MS))
    one.excess = 1e-7
    assert hold(Excess(speeds), hops(one), 0.02, lambda: sum(speeds.row_seconds(one))).count(True) == 1
    assert one.excess == 0.0


def test_who_was_doubted_and_does_not_serve_is_given_another_chance_after_a_while() -> None:
    excess, one, serving = Excess(of_one_kind(2)), member("a"), member("b")
    one.excess = serving.excess = 1e-7
    one.charged_at = serving.charged_at = 100.0
    serving.hops = hops(serving)
    assert not excess.forgive([one, serving], 100.0 + FORGIVE_SECONDS / 2)
    assert excess.forgive([one, serving], 100.0 + FORGIVE_SECONDS)
    assert (one.excess, serving.excess) == (0.0, 1e-7)


def test_a_claim_that_can_be_checked_alone_is_corrected_to_what_was_seen() -> None:
    speeds, liar = of_one_kind(2), member("liar", layer_times=timed(1))
    route = hops(liar)
    assert any(hold(Excess(speeds), route, 0.08, lambda: sum(speeds.row_seconds(liar))))
    assert sum(speeds.row_seconds(liar)) == pytest.approx(0.08)


@pytest.mark.parametrize(("measured", "predicted"), [(0.019, 0.01), (0.004, 0.0001), (1.0, 0.0)])
def test_what_is_little_or_not_predicted_charges_nobody(measured: float, predicted: float) -> None:
    route = hops(member("a"))
    assert not any(hold(Excess(of_one_kind(2)), route, measured, lambda: predicted))
    assert route[0].member.excess == 0.0


def test_what_does_not_last_charges_nobody() -> None:
    excess, route = Excess(of_one_kind(2)), hops(member("a"))
    for second in range(200):
        slow = second % 20 < 19
        assert not excess.note(route, 0.1 if slow else 0.01, 0.01, float(second))


def test_who_comes_back_is_known_again_to_be_slower_than_it_says() -> None:
    members, one = Members(), member("a")
    members.add(one)
    one.excess = 3e-9
    members.remove(one, "it left")
    again = member("a")
    members.add(again)
    assert again.excess == 3e-9
    later = member("a")
    members.add(later)
    assert later.excess == 3e-9, "and whoever takes its place"


def test_a_stage_that_stays_slow_for_two_minutes_has_drifted_and_comes_back_as_slowly() -> None:
    drift, changes = Drift(0.1), []
    for second in range(1000):
        slow = 100 <= second < 500
        if drift.note(0.14 if slow else 0.1, float(second)):
            changes.append((second, drift.pace))
    assert changes == [(100 + HOLD_SECONDS, Pace.SLOWER), (500 + HOLD_SECONDS, Pace.AS_PLANNED)]


@pytest.mark.parametrize("seconds", [0.129, 0.08])
def test_a_little_is_no_drift(seconds: float) -> None:
    drift = Drift(0.1)
    assert not any(drift.note(seconds, float(second)) for second in range(1000))


def test_between_the_bounds_nothing_flaps() -> None:
    """Slower by 20% to 36%, within minutes: what crosses the bound is not slow, and what is slow stays so."""
    drift = Drift(0.1)
    quick, long = ([0.128 + 0.008 * math.sin(second / scale) for second in range(5000)] for scale in (10, 100))
    assert not any(drift.note(seconds, float(second)) for second, seconds in enumerate(quick))
    changes = [drift.pace for second, seconds in enumerate(long) if drift.note(seconds, 5000.0 + second)]
    assert changes == [Pace.SLOWER]


def test_layers_of_microseconds_never_drift() -> None:
    drift = Drift(0.0001)
    assert not any(drift.note(0.0015 if second % 300 else 0.0001, float(second)) for second in range(1000))


def test_what_has_become_faster_counts_as_well() -> None:
    drift = Drift(0.1)
    assert any(drift.note(0.05, float(second)) for second in range(200))
    assert drift.pace is Pace.FASTER


def test_bounds_leave_room_between_them() -> None:
    assert 1 < drifts.BACK < drifts.DRIFT < excesses.UNEXPLAINED


def test_wires_are_known_by_the_ids_of_their_ends() -> None:
    a, b, c = member("a", round_trip=0.02), member("b", round_trip=0.01, bandwidth=1e6), member("c")
    route, wires = Route.__new__(Route), Wires()
    route.hops = tuple(hops(a, b, c))
    wires.note_link(route, a, PeerLink(0, 3000, 10**7))
    wires.note_link(route, c, PeerLink(1, 1, 0))  # a link of b's, which is not its to tell of
    wires.note_link(route, c, PeerLink(2, 1, 0))  # it is the last one
    assert wires.known([a, b, c]) == {
        (COORDINATOR, "a"): Wire(0.01 + MESSAGE_SECONDS),
        (COORDINATOR, "b"): Wire(0.005 + MESSAGE_SECONDS, 1e6),
        ("a", "b"): Wire(0.0015 + MESSAGE_SECONDS, 1e7),
    }
    assert set(wires.known([a, c])) == {(COORDINATOR, "a")}


def test_between_those_that_need_a_relay_there_are_two_wires() -> None:
    a, b = member("a", round_trip=0.02, bandwidth=2e6), member("b", round_trip=0.01, bandwidth=2e6)
    route, wires = Route.__new__(Route), Wires()
    route.hops = tuple(hops(a, b))
    route.hops[1].link = "relayed by the coordinator: it timed out"
    wires.note_relayed(route)
    assert wires.known([a, b])["a", "b"] == Wire(pytest.approx(0.015 + 2 * MESSAGE_SECONDS), pytest.approx(1e6))
    route.hops[1].link = DIRECT
    wires.note_relayed(route)
    wires.note_link(route, a, PeerLink(0, 2000, 0))
    assert wires.known([a, b])["a", "b"] == Wire(0.001 + MESSAGE_SECONDS)


def test_a_wire_between_ends_on_the_coordinators_machine_is_known_as_such() -> None:
    a, b, away = (member(name, round_trip=0.001) for name in ("a", "b", "away"))
    for here in (a, b):
        cast(FakeLink, here.link).within_this_machine = True
    wires = Wires()
    wires.note("a", "b", Wire(0.001))
    wires.note("b", "away", Wire(0.001))
    within = {ends for ends, wire in wires.known([a, b, away]).items() if wire.within_machine}
    assert within == {(COORDINATOR, "a"), (COORDINATOR, "b"), ("a", "b")}


def test_as_many_wires_are_kept_as_there_is_room_for() -> None:
    wires, a = Wires(), member("a")
    others = [member(str(number)) for number in range(MAX_PAIRS + 5)]
    for other in others:
        wires.note("a", other.node_id, Wire(0.1))
    assert len(wires.known([a, *others])) == MAX_PAIRS


def test_a_token_is_the_median_of_late_once_there_are_enough() -> None:
    times = TokenTimes()
    times.begin(0.004)
    for _ in range(MIN_STEPS - 1):
        times.note(0.1, 0.09)
    assert (times.token, times.head) == (0.0, 0.004)
    times.note(9.0, 0.09)
    assert (times.token, times.head) == pytest.approx((0.1, 0.01))
    times.route_began()
    assert times.token == 0.0
    for _ in range(STEPS):
        times.note(0.2, 0.18)
    assert (times.token, times.head) == pytest.approx((0.2, 0.02))
