"""What encryption costs on a link: round trips of a decoded token's row and of a prompt's chunk, and connecting.

Both ends are in this process, which so pays for both; rounds with and without TLS alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from functools import partial

import trio
from _measure import machine, spread

from core.interfaces.transport import Transport
from core.plugins import PluginHost
from core.testing.contracts import HOST, echo
from core.trust.identity import Identity

SIZES = {"4 KB, a row": (4096, 400), "128 KB, a chunk": (128 * 1024, 40)}
CONNECT = "connecting"


async def measure(transport: Transport, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Microseconds by what was done and how."""
    identity, found = Identity.fresh(), defaultdict[tuple[str, str], list[float]](list)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(partial(transport.listen, credentials=identity.credentials()), HOST, 0, echo)
        for _ in range(rounds):
            for how, pin in (("plain", None), ("TLS", identity.fingerprint)):
                started = time.perf_counter()
                async with transport.dial(HOST, port, timeout=5, pin=pin) as channel:
                    found[CONNECT, how].append((time.perf_counter() - started) * 1e6)
                    for what, (size, times) in SIZES.items():
                        message, started = bytes(size), time.perf_counter()
                        for _ in range(times):
                            await channel.send(message)
                            await channel.receive()
                        found[what, how].append((time.perf_counter() - started) / times * 1e6)
        nursery.cancel_scope.cancel()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(machine())
    found = trio.run(measure, PluginHost.installed().transports.get("trio-websocket"), rounds)
    for what in (*SIZES, CONNECT):
        for how in ("plain", "TLS"):
            print(f"{what:16} {how:6} {spread(found[what, how], 'us', digits=0)}")
        added = statistics.median(found[what, "TLS"]) - statistics.median(found[what, "plain"])
        print(f"{what:16} TLS adds {added:.0f} us")


if __name__ == "__main__":
    main()
