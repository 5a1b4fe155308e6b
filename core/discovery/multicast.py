"""Announcing and looking by multicast DNS (RFC 6762), by zeroconf, which has a thread and an event loop of its own."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from ipaddress import ip_address
from typing import TypeVar

import trio
from zeroconf import ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from core.discovery.advert import Advert
from core.errors import NoMulticast

SERVICE = "_core-cluster._tcp.local."
FIND_SECONDS = 3.0
MAX_FOUND = 32
"""Clusters that are looked at: anyone on the network may announce as many as it likes."""
_START_SECONDS = 5.0
_STOP_SECONDS = 2.0
_ADDRESS_SECONDS = 120
"""How long others may remember a record (RFC 6762, section 10)."""
_EXPLICIT = "an invite leads to the coordinator without it"
_log = logging.getLogger(__name__)
T = TypeVar("T")


async def keep_announcing(advert: Advert) -> None:
    """Until cancelled. Where the network has no multicast it says so in the log, and is silent."""
    try:
        async with _opened() as zeroconf:
            await _bounded(_START_SECONDS, partial(_announce, advert, zeroconf))
            _log.info("announced on the local network as %r, key %s", advert.name, advert.key)
            await trio.sleep_forever()
    except NoMulticast as error:
        _log.warning("this cluster can't be found on the local network: %s", error)


@asynccontextmanager
async def _opened() -> AsyncIterator[Zeroconf]:
    """Withdraws at its end what was announced, or leaves it to expire where that takes too long."""
    zeroconf = await _bounded(_START_SECONDS, _open)
    try:
        yield zeroconf
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(_STOP_SECONDS):
            await trio.to_thread.run_sync(zeroconf.close, abandon_on_cancel=True)


async def find(seconds: float = FIND_SECONDS) -> list[Advert]:
    """The clusters that announce themselves within that time, by name. What they claim is not proven.

    Raises NoMulticast where this machine can't look.
    """
    return await _bounded(seconds + _START_SECONDS, partial(_find, seconds))


async def _bounded(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns, in a thread that is left behind where it takes longer. Raises NoMulticast."""
    with trio.move_on_after(seconds):
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
    raise NoMulticast("multicast DNS does not answer", f"not within {seconds:g} s", _EXPLICIT)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    # A cluster serves without being found, whatever a network does to zeroconf.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise NoMulticast("multicast DNS does not work here", reason, _EXPLICIT) from None


def _open() -> Zeroconf:
    with _translated():
        return Zeroconf()


def _announce(advert: Advert, zeroconf: Zeroconf) -> None:
    label = f"core-{advert.key}"
    info = ServiceInfo(
        SERVICE,
        f"{label}.{SERVICE}",
        port=advert.port,
        properties=advert.properties(),
        server=f"{label}.local.",
        parsed_addresses=list(filter(_is_address, advert.hosts)),
        host_ttl=_ADDRESS_SECONDS,
        other_ttl=_ADDRESS_SECONDS,
    )
    with _translated():
        zeroconf.register_service(info, allow_name_change=True)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _find(seconds: float) -> list[Advert]:
    deadline = time.monotonic() + seconds
    names: queue.Queue[str] = queue.Queue(MAX_FOUND)

    def note(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Added and not names.full():
            names.put_nowait(name)

    found: dict[bytes, Advert] = {}
    with _open() as zeroconf, _translated():
        browser = ServiceBrowser(zeroconf, SERVICE, handlers=[note])
        try:
            for name in _until(deadline, names):
                left = max(0.0, deadline - time.monotonic())
                info = zeroconf.get_service_info(SERVICE, name, timeout=int(left * 1000))
                advert = Advert.read(info.port, info.properties) if info else None
                if advert is not None and len(found) < MAX_FOUND:
                    found.setdefault(advert.fingerprint, advert)
        finally:
            browser.cancel()
    return sorted(found.values(), key=lambda advert: (advert.name, advert.key))


def _until(deadline: float, names: queue.Queue[str]) -> Iterator[str]:
    while (left := deadline - time.monotonic()) > 0:
        try:
            yield names.get(timeout=left)
        except queue.Empty:
            return
