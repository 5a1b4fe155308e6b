"""What an invite says of where a machine is."""

from __future__ import annotations

import pytest

from core.trust.addresses import Interface, best_of, host_of, is_loopback

LOOPBACK = Interface("lo", ("127.0.0.1", "::1"))
DOCKER = Interface("docker0", ("172.17.0.1",))
WIFI = Interface("wlan0", ("fe80::1%wlan0", "2001:db8::5", "192.168.1.50"))
UNPLUGGED = Interface("eth0", ("169.254.7.7",))


@pytest.mark.parametrize(
    ("interfaces", "expected"),
    [
        ([LOOPBACK, DOCKER, WIFI, UNPLUGGED], ["192.168.1.50", "2001:db8::5"]),
        ([LOOPBACK, DOCKER], ["172.17.0.1"]),
        ([LOOPBACK, UNPLUGGED], ["169.254.7.7"]),
        ([LOOPBACK], []),
        ([Interface("eth0", tuple(f"10.0.0.{n}" for n in range(9)))], [f"10.0.0.{n}" for n in range(4)]),
    ],
)
def test_addresses_that_others_can_reach(interfaces: list[Interface], expected: list[str]) -> None:
    assert best_of(interfaces) == expected


def test_addresses_are_of_the_kind_that_is_listened_on() -> None:
    assert best_of([LOOPBACK, WIFI], 4) == ["192.168.1.50"]
    assert best_of([LOOPBACK, WIFI], 6) == ["2001:db8::5"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("192.168.1.50", False),
        ("::ffff:192.168.1.50", False),
        ("0.0.0.0", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_host_of_a_peer() -> None:
    assert host_of("10.0.0.1:7001") == "10.0.0.1"
    assert host_of("[::1]:7001") == "::1"
