"""The record by which a cluster is found: what is written comes back, and what is not as we write it is nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from core.discovery.advert import MAX_HOSTS, Advert

FINGERPRINT = bytes(range(32))
ADVERT = Advert("SmolLM2", ("192.168.1.5", "fd00::5", "home.example.org"), 7001, FINGERPRINT, 1)


def record(advert: Advert = ADVERT, **changed: str | bytes | None) -> dict[bytes, bytes | None]:
    values = {**advert.properties(), **changed}
    return {key.encode(): value.encode() if isinstance(value, str) else value for key, value in values.items()}


def test_what_is_announced_is_read() -> None:
    assert Advert.read(7001, record()) == ADVERT
    over_tcp = replace(ADVERT, transport="tcp")
    assert Advert.read(7001, record(over_tcp)) == over_tcp
    assert over_tcp.cluster().transport == "tcp"
    without = {key: value for key, value in record().items() if key != b"transport"}
    assert Advert.read(7001, without) == ADVERT, "an older core announces none"
    assert Advert.read(7001, {**record(), b"later": b"unknown keys are none of ours"}) == ADVERT


def test_every_value_fits_its_string() -> None:
    long = Advert("名" * 500, tuple(f"{'a' * 60}{n}.example" for n in range(20)), 7001, FINGERPRINT, 1)
    for key, value in long.properties().items():
        assert len(f"{key}={value}".encode()) <= 255
    read = Advert.read(7001, record(long))
    assert read is not None
    assert read.hosts == long.hosts[:2], "as many as fit"
    assert read.name == "名" * 20


JUNK: dict[str, dict[str, str | bytes | None]] = {
    "a short fingerprint": {"fingerprint": "ab"},
    "a fingerprint that is no hex": {"fingerprint": "z" * 64},
    "no protocol": {"protocol": None},
    "a huge protocol": {"protocol": "9" * 9},
    "a negative protocol": {"protocol": "-1"},
    "other digits": {"protocol": "\N{ARABIC-INDIC DIGIT ONE}"},
    "no hosts": {"hosts": ""},
    "only loopback": {"hosts": "127.0.0.1,localhost,::1"},
    "only nonsense": {"hosts": "a b,http://x/,-x,0.0.0.0,224.0.0.1,[::1]:3"},
    "a long value": {"hosts": ("192.168.1.5," * 40)},
    "no UTF-8": {"name": b"\xff\xfe"},
    "a transport that is no name": {"transport": "two words"},
    "no transport's name": {"transport": ""},
}


@pytest.mark.parametrize("changed", JUNK.values(), ids=JUNK)
def test_junk_is_nothing(changed: dict[str, str | bytes | None]) -> None:
    assert Advert.read(7001, record(**changed)) is None


@pytest.mark.parametrize("port", [None, 0, -1, 65_536])
def test_a_port_that_is_none(port: int | None) -> None:
    assert Advert.read(port, record()) is None


def test_a_missing_key_is_junk() -> None:
    for key in record().keys() - {b"transport"}:
        assert Advert.read(7001, {other: value for other, value in record().items() if other != key}) is None


def test_a_name_does_not_move_the_terminal() -> None:
    read = Advert.read(7001, record(name="\x1b[2Jsafe\n\u202e"))
    assert read is not None
    assert read.name == "[2Jsafe"
    nameless = Advert.read(7001, record(name="\x07"))
    assert nameless is not None
    assert nameless.name == "unnamed"


def test_loopback_and_nonsense_are_left_out_and_the_rest_is_bounded() -> None:
    read = Advert.read(7001, record(hosts="127.0.0.1,192.168.1.5,10.0.0.1,a.example,10.0.0.3,10.0.0.4"))
    assert read is not None
    assert read.hosts == ("192.168.1.5", "10.0.0.1", "a.example")
    assert len(read.hosts) < MAX_HOSTS


def test_random_records_are_read_or_nothing() -> None:
    rng = random.Random(1)
    for _ in range(5000):
        values = record()
        key = rng.choice(list(values))
        value = bytearray(values[key] or b"")
        for _ in range(rng.randint(1, 3)):
            value[rng.randrange(len(value))] = rng.randrange(256)
        read = Advert.read(7001, {**values, key: bytes(value)})
        assert read is None or (read.hosts and len(read.fingerprint) == 32 and read.name.isprintable())
