"""The node as a whole: one device, one compute thread, and a coordinator that is looked for until it is found."""

from __future__ import annotations

import logging
import random

import torch
import trio

from core.errors import ChannelClosed, ProtocolError, sole_error
from core.interfaces.transport import Transport
from core.link import open_link
from core.node.connection import Connection
from core.node.settings import NodeSettings
from core.node.state import Activity, Duty, Node
from core.plugins import PluginHost
from core.runtime.compute import open_compute_thread
from core.runtime.device import default_threads, pick

DIAL_SECONDS = 5.0
FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 10.0
_log = logging.getLogger(__name__)


async def run_node(settings: NodeSettings, plugins: PluginHost, activity: Activity, duty: Duty | None = None) -> None:
    """Serves until cancelled, or until `duty` says to leave and the coordinator was told goodbye.

    Raises ConfigError for a device that isn't there, a coordinator of another protocol, or another node that took
    this one's id.
    A coordinator that goes away, or isn't there yet, is dialled again after a wait that doubles up to 10 s.
    """
    device = pick(settings.device)
    transport = plugins.transports.get(settings.transport)
    async with open_compute_thread("stage") as compute:
        await compute.run(torch.set_num_threads, settings.threads or default_threads())
        node = Node(
            node_id=settings.node_id,
            device=device,
            max_memory=settings.max_memory,
            cache_dir=settings.hf_cache_dir,
            peer_host=settings.peer_host,
            compute=compute,
            transport=transport,
            plugins=plugins,
            activity=activity,
            duty=duty or Duty(),
        )
        await _stay_connected(node, settings, transport)


async def _stay_connected(node: Node, settings: NodeSettings, transport: Transport) -> None:
    wait = FIRST_WAIT_SECONDS
    address = f"{settings.cluster_host}:{settings.cluster_port}"
    while not node.duty.leaving:
        began = trio.current_time()
        try:
            await _one_connection(node, settings, transport)
        except (ChannelClosed, ProtocolError) as error:
            if node.duty.leaving:
                return
            if trio.current_time() - began > LONGEST_WAIT_SECONDS:
                wait = FIRST_WAIT_SECONDS
            _log.info("not connected to %s: %s; trying again in %.2g s", address, error, wait)
            node.activity.become("connecting", str(error))
        with trio.move_on_after(wait * random.uniform(0.5, 1.0)):
            await node.duty.wait_leave()
        wait = min(2 * wait, LONGEST_WAIT_SECONDS)


async def _one_connection(node: Node, settings: NodeSettings, transport: Transport) -> None:
    try:
        async with (
            transport.dial(settings.cluster_host, settings.cluster_port, timeout=DIAL_SECONDS) as channel,
            open_link(channel) as link,
        ):
            _log.info("connected to %s", link.peer)
            await Connection(node, link).run()
    except BaseExceptionGroup as group:
        raise sole_error(group) from None
