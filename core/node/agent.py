"""The node as a whole: one device, a thread that computes, one that loads, and a coordinator to be found."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from core.errors import ChannelClosed, ConfigError, CoreError, ProtocolError, TrustError, sole_error
from core.interfaces.transport import Channel, Transport
from core.link import open_link
from core.node.connection import Connection
from core.node.disk_record import DiskRecord
from core.node.layer_keeper import LayerKeeper
from core.node.settings import NodeSettings
from core.node.state import Activity, Duty, Node, Presence
from core.plugins import PluginHost
from core.runtime.compute import open_compute_thread
from core.runtime.device import give_back_memory, pick, set_up_torch
from core.runtime.layer_times import KeptTimes
from core.runtime.speed import weight_speed
from core.trust.addresses import is_this_machine
from core.trust.cluster import Cluster
from core.trust.identity import Identity

DIAL_SECONDS = 5.0
FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 10.0
SOON_SECONDS, SOON_WAIT_SECONDS = 60.0, 2.0
"""A coordinator that was there a minute ago is looked for more often: it may be about to start again."""
HELD_SECONDS = 600.0
"""For how long layers are held for a coordinator that is gone."""
_log = logging.getLogger(__name__)


async def run_node(settings: NodeSettings, plugins: PluginHost, activity: Activity, duty: Duty | None = None) -> None:
    """Serves until cancelled, or until `duty` says to leave and the coordinator was told goodbye.

    Raises ConfigError for a device that isn't there, a coordinator of another protocol, or another node that took
    this one's id; TrustError where the coordinator knows neither this machine nor its invite, or its host removed it.
    A coordinator that goes away, or isn't there yet, is dialled again after a wait that doubles up to 10 s, in the
    first minute to 2 s. Layers are held for it for ten minutes.
    """
    membership = settings.membership
    if membership is None and not is_this_machine(settings.cluster_host):
        raise ConfigError(
            f"{settings.cluster_host} is another machine",
            "a node needs an invite to join there",
            "ask its host for the link that `core invite` prints, and give it to --join",
        )
    device = pick(settings.device)
    transport = plugins.transports.get(settings.reached_by)
    async with open_compute_thread("load") as loads, open_compute_thread("stage") as compute:
        await compute.run(set_up_torch, settings.threads)
        node = Node(
            node_id=settings.node_id,
            device=device,
            speed=await compute.run(weight_speed, device),
            times=await compute.run(KeptTimes, device),
            disk=DiskRecord(),
            labels=settings.labels,
            max_memory=settings.max_memory,
            cache_dir=settings.hf_cache_dir,
            compiles=settings.compiles,
            peer_host=settings.peer_host,
            local_token=settings.local_token,
            identity=membership.identity if membership else Identity.fresh(),
            membership=membership,
            compute=compute,
            loads=loads,
            keeper=LayerKeeper(device, settings.max_memory, compiled=settings.compiles),
            presence=Presence(),
            transport=transport,
            plugins=plugins,
            activity=activity,
            duty=duty or Duty(),
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_let_go_when_alone, node)
                await _stay_connected(node, settings, transport)
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole_error(group) from None


class Unreached(ChannelClosed):
    """The coordinator does not answer at any of its addresses: its machine is off, or out of reach."""


async def _let_go_when_alone(node: Node) -> None:
    while True:
        await node.presence.wait_alone(HELD_SECONDS)
        if node.keeper.keep([]):
            _log.info("no coordinator came for %g s: the layers that were held for it are let go of", HELD_SECONDS)
            await trio.to_thread.run_sync(give_back_memory, node.device)
            node.activity.weight_bytes = 0
        await node.presence.wait_welcomed()


async def _stay_connected(node: Node, settings: NodeSettings, transport: Transport) -> None:
    """Tries again whenever it ends, whatever ends it but a refusal. A reason that goes on is logged once, and then for
    debugging alone."""
    wait, told = FIRST_WAIT_SECONDS, ""
    while not node.duty.leaving:
        began = trio.current_time()
        try:
            await _one_connection(node, settings, transport)
        except (ConfigError, TrustError):
            raise
        except Exception as error:
            if node.duty.leaving:
                return
            if trio.current_time() - began > LONGEST_WAIT_SECONDS:
                wait, told = FIRST_WAIT_SECONDS, ""
            expected = isinstance(error, ChannelClosed | ProtocolError)
            is_told = isinstance(error, CoreError)
            reason = str(error) if is_told else f"{type(error).__name__}: {error}"
            _log.log(
                logging.DEBUG if reason == told else logging.INFO if expected else logging.ERROR,
                "not connected: %s; trying again, at least every %g s",
                reason,
                LONGEST_WAIT_SECONDS,
                exc_info=None if is_told else error,
            )
            told = reason
            node.activity.become("unreachable" if isinstance(error, Unreached) else "connecting", reason)
        longest = SOON_WAIT_SECONDS if node.presence.alone_for < SOON_SECONDS else LONGEST_WAIT_SECONDS
        with trio.move_on_after(min(wait, longest) * random.uniform(0.5, 1.0)):
            await node.duty.wait_leave()
        wait = min(2 * wait, longest)


async def _one_connection(node: Node, settings: NodeSettings, transport: Transport) -> None:
    try:
        async with _dialled(settings, transport) as channel, open_link(channel) as link:
            _log.info("connected to %s", link.peer)
            await Connection(node, link).run()
    except BaseExceptionGroup as group:
        raise sole_error(group) from None


@asynccontextmanager
async def _dialled(settings: NodeSettings, transport: Transport) -> AsyncIterator[Channel]:
    """A channel to the coordinator. Raises Unreached where nothing answers, ChannelClosed where something else does."""
    async with AsyncExitStack() as stack:
        if settings.membership is not None:
            yield await _first_that_answers(stack, transport, settings.membership.cluster)
        else:
            dial = transport.dial(settings.cluster_host, settings.cluster_port, timeout=DIAL_SECONDS)
            try:
                channel = await stack.enter_async_context(dial)
            except ChannelClosed as error:
                raise Unreached(error.title, error.message, error.hint) from error
            yield channel


async def _first_that_answers(stack: AsyncExitStack, transport: Transport, cluster: Cluster) -> Channel:
    failures: list[CoreError] = []
    for host in cluster.hosts:
        try:
            dial = transport.dial(host, cluster.port, timeout=DIAL_SECONDS, pin=cluster.fingerprint)
            return await stack.enter_async_context(dial)
        except (ChannelClosed, TrustError) as error:
            failures.append(error)
    kind = ChannelClosed if any(isinstance(each, TrustError) for each in failures) else Unreached
    raise kind("the coordinator is not reached", "; ".join(map(str, failures)))
