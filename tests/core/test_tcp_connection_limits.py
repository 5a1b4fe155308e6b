"""Who gets no connection: not the total, and not one address, can take what others need."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import pytest

from core.port_limits import raise_open_files
from core.tcp.connection_limits import Full, Limits, RateLimitedLog, Seats

HERE, A, B = "127.0.0.1", "10.0.0.1", "10.0.0.2"
ROOMY = Limits(connections=100, half_open=100, per_address=100, half_open_per_address=100, burst=1000, per_second=1000)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def seats(**limits: float) -> Seats:
    fields = {name: getattr(ROOMY, name) for name in Limits.__slots__}
    return Seats(Limits(**{**fields, **limits}), Clock())  # type: ignore[arg-type]


def test_the_total_is_bounded_and_a_seat_that_is_left_is_free() -> None:
    places = seats(connections=2)
    with ExitStack() as stack:
        stack.enter_context(places.seat(A))
        with places.seat(HERE), pytest.raises(Full, match="2 are open"), places.seat(B):
            pass
        stack.enter_context(places.seat(B))


def test_one_address_does_not_take_all() -> None:
    places = seats(per_address=2)
    with places.seat(A) as settle, places.seat(A):
        settle()
        with pytest.raises(Full, match="2 from there are open"), places.seat(A):
            pass
        with places.seat(B):
            pass


def test_those_who_have_not_said_who_they_are_do_not_take_all() -> None:
    places = seats(half_open=2, half_open_per_address=1)
    with places.seat(A) as settle:
        with pytest.raises(Full, match="1 from there are half open"), places.seat(A):
            pass
        with places.seat(B), pytest.raises(Full, match="2 are half open"), places.seat("10.0.0.3"):
            pass
        settle()
        settle()
        with places.seat(A), places.seat(B):
            pass


def test_an_address_may_not_come_again_and_again() -> None:
    clock = Clock()
    places = Seats(Limits(burst=3, per_second=1), clock)

    def admitted() -> int:
        count = 0
        for _ in range(10):
            try:
                with places.seat(A):
                    count += 1
            except Full:
                return count
        return count

    assert admitted() == 3
    clock.now += 2
    assert admitted() == 2
    clock.now += 100
    assert admitted() == 3
    with places.seat(B):
        pass


def test_loopback_is_bounded_in_all_alone() -> None:
    places = seats(half_open=1, per_address=1, burst=1, per_second=0)
    for host in (HERE, "::1"):
        with places.seat(host), places.seat(host):
            pass


def test_of_ipv6_a_network_counts_as_one_address() -> None:
    places = seats(per_address=1)
    with places.seat("2001:db8::1"):
        with pytest.raises(Full, match="1 from there are open"), places.seat("2001:db8::2"):
            pass
        with places.seat("2001:db8:0:1::1"), places.seat("::ffff:10.0.0.1"), places.seat("fe80::1%eth0"):
            pass
    assert not places._open


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such bound")
def test_connections_are_bounded_by_the_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (80, 1000))
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    assert Limits().within_open_files() == Limits(connections=20, half_open=10)
    raise_open_files()
    assert raised == [(1000, 1000)]


def test_a_flood_is_told_of_once_in_a_while() -> None:
    clock = Clock()
    limited = RateLimitedLog(10, clock)
    told = []
    for clock.now in (0, 1, 9.9, 10, 15, 100):
        told.append(limited())
    assert told == [True, False, False, True, False, True]


def test_many_addresses_do_not_fill_the_memory() -> None:
    places = seats()
    for number in range(10_000):
        with places.seat(f"10.1.{number // 250}.{number % 250}"):
            pass
    assert len(places._rates) <= 4096
    assert not places._open
    assert not places._half_open
