"""By real multicast, where this machine has it: announced, found, withdrawn; and a sentence where it has not."""

from __future__ import annotations

import logging
import socket

import pytest
import trio

from core.discovery import multicast
from core.discovery.advert import Advert
from core.discovery.check import hear_oneself
from core.discovery.multicast import find, keep_announcing
from core.errors import NoMulticast
from core.trust.addresses import reachable
from core.trust.identity import Identity

SECONDS = 300


@pytest.fixture
def advert() -> Advert:
    """Of a cluster that nobody else announces. Skips where there is no multicast."""
    addresses = [address for address in reachable() if ":" not in address]
    if not addresses:
        pytest.skip("this machine has no IPv4 address beyond loopback")
    try:
        hear_oneself(addresses[0])
    except NoMulticast as error:
        pytest.skip(str(error))
    return Advert("tiny", ("192.168.77.5", "home.example.org"), 7001, Identity.fresh().fingerprint, 1)


async def seen(advert: Advert) -> bool:
    return advert in await find(0.5)


async def test_a_cluster_is_found_until_it_ends(advert: Advert) -> None:
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_announcing, advert)
            while not await seen(advert):
                pass
            nursery.cancel_scope.cancel()
        assert not await seen(advert)


@pytest.fixture
def no_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(multicast, "Zeroconf", fail)


async def test_a_network_without_multicast_stops_nobody(no_multicast: None, caplog: pytest.LogCaptureFixture) -> None:
    with trio.fail_after(SECONDS):
        await keep_announcing(Advert("tiny", ("192.168.77.5",), 7001, bytes(32), 1))
        with pytest.raises(NoMulticast, match=r"does not work here: .*unreachable"):
            await find(0.1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "can't be found on the local network" in record.getMessage()


def test_no_multicast_at_an_address_of_another_machine() -> None:
    with pytest.raises(NoMulticast, match=r"no multicast at 203\.0\.113\.9"):
        hear_oneself("203.0.113.9")


def test_a_deaf_machine_is_noticed_in_time(advert: Advert, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "sendto", lambda *_: 0)
    (address, *_) = [address for address in reachable() if ":" not in address]
    with pytest.raises(NoMulticast, match="does not come back"):
        hear_oneself(address, seconds=0.05)
