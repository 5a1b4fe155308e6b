"""A node's time with one coordinator: says hello, then obeys until the link ends."""

from __future__ import annotations

import logging
import platform
import socket
from functools import partial
from importlib.metadata import version

import msgspec
import trio

import core
from core.errors import ChannelClosed, ConfigError, CoreError, ProtocolError, TrustError
from core.interfaces.transport import Channel
from core.link import Link, first_message
from core.node.asking import Request
from core.node.epoch import Epoch, nothing_cached
from core.node.peers import accept_downstream
from core.node.proof import answer_challenge
from core.node.state import Node
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Asking,
    Assignment,
    CacheOrder,
    ConnectPeer,
    Device,
    Error,
    Hello,
    HelloAck,
    Leave,
    Pause,
    Release,
    Run,
    clipped,
)
from core.runtime import device as devices
from core.trust.addresses import is_loopback

_REFUSALS: dict[str, type[CoreError]] = {"protocol_version": ConfigError, "not_a_member": TrustError}
"""For good: it is of no use to come again."""
_log = logging.getLogger(__name__)


class Connection:
    """`run` returns when the node has left. It raises, in an exception group, ChannelClosed when the coordinator goes,
    ProtocolError when it talks nonsense, ConfigError or TrustError when it refuses this node for good."""

    def __init__(self, node: Node, link: Link) -> None:
        self._node = node
        self._link = link
        self._epoch: Epoch | None = None
        self._released = trio.Event()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            host = self._node.peer_host or self._link.local_host
            credentials = None if is_loopback(host) else self._node.identity.credentials()
            listen = partial(self._node.transport.listen, host, 0, self._accept_peer, credentials=credentials)
            peer_port: int = await nursery.start(listen)
            paused = await self._introduce(peer_port)
            self._node.activity.become("waiting")
            nursery.start_soon(self._tell_duty, paused, nursery.cancel_scope)
            try:
                while True:
                    await self._obey(nursery)
            except ProtocolError as error:
                await self._link.end_with(Error("protocol", clipped(error)))
                raise

    async def _introduce(self, peer_port: int) -> str:
        """What the coordinator was told of this node's being paused."""
        membership = self._node.membership
        cluster = membership.cluster if membership else None
        listener, invite = (cluster.fingerprint, cluster.secret) if cluster else (None, None)
        signature = await answer_challenge(self._link, self._node.identity, "node", listener)
        offer = hello(self._node, [self._link.local_host], peer_port)
        request = Request(self._node, cluster) if cluster and cluster.asks else None
        asks = request.commitment if request else None
        await self._link.send(msgspec.structs.replace(offer, signature=signature, invite=invite, asks=asks))
        answer = await first_message(self._link)
        if request is not None and isinstance(answer, Asking):
            answer = await request.answered(self._link, answer)
        if isinstance(answer, Error):
            await self._be_refused(answer)
        if not isinstance(answer, HelloAck):
            raise ProtocolError(f"the coordinator answered HELLO with a {answer.TYPE}")
        if membership is not None:
            await trio.to_thread.run_sync(membership.welcomed)
            _log.info("this machine is a member, as %s", answer.node_id)
        return offer.paused

    async def _be_refused(self, refusal: Error) -> None:
        if refusal.code == "not_a_member" and self._node.membership is not None:
            await trio.to_thread.run_sync(self._node.membership.refused)
        raise _REFUSALS.get(refusal.code, ProtocolError)("the coordinator refused this node", refusal.message)

    async def _tell_duty(self, told: str, scope: trio.CancelScope) -> None:
        """Keeps the coordinator informed; when the node leaves, the connection ends with `scope`."""
        duty = self._node.duty
        while True:
            if duty.paused != told:
                told = duty.paused
                self._released = trio.Event()
                await self._link.send(Pause(clipped(told), leaves=duty.leaving != ""))
            if duty.leaving:
                await self._leave(duty.leaving)
                scope.cancel()
            if duty.paused == told:
                await duty.wait_change()

    async def _leave(self, reason: str) -> None:
        with trio.move_on_after(self._node.duty.patience):
            if self._epoch is not None:
                await self._released.wait()
        await self._link.end_with(Leave(clipped(reason)))

    async def _obey(self, nursery: trio.Nursery) -> None:
        packet = await self._link.receive()
        message = packet.message
        if isinstance(message, Assignment):
            await self._end_epoch()
            self._epoch = Epoch(self._node, self._link, message)
            nursery.start_soon(self._epoch.run)
        elif isinstance(message, Release):
            await self._end_epoch()
            self._released.set()
            self._node.activity.become("spare")
            nursery.start_soon(self._let_go)
        elif isinstance(message, Leave):
            raise ChannelClosed("the coordinator left", message.reason)
        elif isinstance(message, Error):
            raise _farewell(message)
        elif isinstance(message, (Run, CacheOrder, ConnectPeer)):
            epoch = self._epoch
            if epoch is None or message.epoch != epoch.assignment.epoch:
                return
            if isinstance(message, ConnectPeer):
                epoch.connect_upstream(message)
            else:
                epoch.put(packet)
        else:
            raise ProtocolError(f"the coordinator sent a {message.TYPE}")

    async def _let_go(self) -> None:
        """In the compute thread, behind a load that was called off and still runs to its end there."""
        await self._node.compute.run(self._node.holdings.drop)
        await self._link.send(nothing_cached(self._node))

    async def _end_epoch(self) -> None:
        if self._epoch is not None:
            await self._epoch.end()
            self._epoch = None

    async def _accept_peer(self, channel: Channel) -> None:
        epoch = self._epoch
        assignment = epoch.assignment if epoch else None
        async with accept_downstream(channel, assignment, self._node.identity) as link:
            assert epoch is not None
            epoch.downstream = link
            try:
                packet = await link.receive()
                raise ProtocolError(f"the downstream node sent a {packet.message.TYPE}")
            except (ChannelClosed, ProtocolError) as error:
                if self._epoch is epoch:
                    await epoch.peer_lost("downstream", error)


def _farewell(message: Error) -> CoreError:
    """Two nodes of one id would push each other out for ever: the earlier one gives way."""
    if message.code == "replaced":
        return ConfigError(
            "another node took this one's place",
            message.message,
            "give each a --node-id of its own, and machines that joined by invite each a --state-dir of its own",
        )
    if message.code == "removed":
        return TrustError("this machine is no member any more", message.message)
    return ChannelClosed("the coordinator ended the link", message.message)


def hello(node: Node, peer_hosts: list[str], peer_port: int) -> Hello:
    """What this node offers. Memory that its present stage holds counts as free: a new stage takes its place."""
    free = devices.free_memory(node.device) + node.holdings.nbytes
    return Hello(
        protocol=PROTOCOL_VERSION,
        node_id=node.node_id,
        hostname=socket.gethostname()[:256],
        core_version=core.__version__,
        python_version=platform.python_version(),
        torch_version=version("torch"),
        platform=platform.system().lower(),
        devices=[Device(d.id, d.type, d.name[:256], d.total_memory) for d in devices.detect()],
        selected_device=str(node.device),
        max_memory_bytes=node.max_memory,
        free_memory=free if node.max_memory is None else min(free, node.max_memory),
        peer_hosts=peer_hosts,
        peer_port=peer_port,
        plugins={plugin.name: plugin.version for plugin in node.plugins.loaded},
        paused=clipped(node.duty.paused),
        certificate=node.identity.certificate,
    )
