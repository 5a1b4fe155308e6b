"""A node's time with one coordinator: says hello, then obeys until the link ends."""

from __future__ import annotations

import logging
import socket
from functools import partial

import msgspec
import trio

import core
from core.errors import ChannelClosed, ConfigError, CoreError, ProtocolError, TrustError
from core.installing import installer
from core.interfaces.transport import Channel
from core.link import Link, first_message
from core.node.asking import Request
from core.node.hop import Hop
from core.node.loading import Preparation
from core.node.peers import accept_downstream
from core.node.proof import answer_challenge
from core.node.report import StateReport, installed, layer_times
from core.node.state import Node
from core.protocol.codec import Packet
from core.protocol.fields import clipped
from core.protocol.messages import (
    PROTOCOL_VERSION,
    Asking,
    Assignment,
    CacheCommand,
    ConnectPeer,
    Error,
    ErrorCode,
    Hello,
    HelloAck,
    KeepLayers,
    Leave,
    LeftOut,
    LoadFailed,
    Pause,
    Release,
    Run,
    StandBy,
)
from core.runtime.device import free_memory, give_back_memory
from core.runtime.speed import speed_now
from core.trust.addresses import is_loopback

_REFUSALS: dict[str, type[CoreError]] = {
    ErrorCode.PROTOCOL_VERSION: ConfigError,
    ErrorCode.NOT_A_MEMBER: TrustError,
    ErrorCode.SAME_KEY: TrustError,
}
"""For good: it is of no use to come again."""
MAX_HOPS = 16
"""How many hops, and layers that are loaded to stand by, a node has at once."""
LOOK_SECONDS = 600.0
"""How often a node without hops looks whether it is as fast as it was when it started."""
AS_FAST = 0.85
_log = logging.getLogger(__name__)


class Connection:
    """`run` returns when the node has left. It raises, in an exception group, ChannelClosed when the coordinator goes,
    ProtocolError when it talks nonsense, ConfigError or TrustError when it refuses this node for good."""

    def __init__(self, node: Node, link: Link) -> None:
        self._node = node
        self._link = link
        self._hops: dict[int, Hop | Preparation] = {}
        """By their numbers, the newest last."""
        self._report = StateReport(node, link, self._serving)
        self._let_go = trio.Event()
        """Set when the coordinator keeps no layers here."""

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            host = self._node.peer_host or self._link.local_host
            credentials = None if is_loopback(host) else self._node.identity.credentials()
            listen = partial(self._node.transport.listen, host, 0, self._accept_peer, credentials=credentials)
            peer_port: int = await nursery.start(listen)
            paused = await self._introduce(peer_port)
            self._node.activity.become("waiting")
            nursery.start_soon(self._tell_duty, paused, nursery.cancel_scope)
            nursery.start_soon(self._report.run)
            nursery.start_soon(self._look_again)
            with self._node.presence.welcomed():
                try:
                    while True:
                        await self._obey(nursery)
                except ProtocolError as error:
                    await self._link.end_with(Error(ErrorCode.PROTOCOL, clipped(error)))
                    raise

    async def _introduce(self, peer_port: int) -> str:
        """What the coordinator was told of this node's being paused."""
        membership = self._node.membership
        cluster = membership.cluster if membership else None
        listener, invite = (cluster.fingerprint, cluster.secret) if cluster else (None, None)
        await trio.to_thread.run_sync(self._node.disk.look)
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
        if refusal.code == ErrorCode.NOT_A_MEMBER and self._node.membership is not None:
            await trio.to_thread.run_sync(self._node.membership.refused)
        hint = self._if_copied() if refusal.code == ErrorCode.SAME_KEY else ""
        raise _REFUSALS.get(refusal.code, ProtocolError)("the coordinator refused this node", refusal.message, hint)

    def _if_copied(self) -> str:
        key = self._node.membership.key_file if self._node.membership is not None else "its key"
        return (
            f"if this disk is a copy of that machine's, move {key} away, and join with an invite of its own; if that is"
            " this machine, end what runs there first"
        )

    async def _tell_duty(self, told: str, scope: trio.CancelScope) -> None:
        """Keeps the coordinator informed; when the node leaves, the connection ends with `scope`."""
        duty = self._node.duty
        while True:
            if duty.paused != told:
                told = duty.paused
                self._let_go = trio.Event()
                await self._link.send(Pause(clipped(told), leaves=duty.leaving != ""))
            if duty.leaving:
                await self._leave(duty.leaving)
                scope.cancel()
            if duty.paused == told:
                await duty.wait_change()

    async def _leave(self, reason: str) -> None:
        with trio.move_on_after(self._node.duty.patience):
            if self._hops:
                await self._let_go.wait()
        await self._link.end_with(Leave(clipped(reason)))

    async def _obey(self, nursery: trio.Nursery) -> None:
        packet = await self._link.receive()
        message = packet.message
        if isinstance(message, (Run, CacheCommand, ConnectPeer)):
            self._pass_to_hop(packet)
        elif isinstance(message, (Assignment, StandBy)):
            await self._begin(message, nursery)
        elif isinstance(message, Release):
            if hop := self._hops.get(message.hop):
                await hop.end()
                nursery.start_soon(self._report.tell)
        elif isinstance(message, KeepLayers):
            nursery.start_soon(self._answer_keep, self._node.keeper.keep(message.holdings))
            if not self._hops and not message.holdings:
                self._let_go.set()
        elif isinstance(message, LeftOut):
            self._node.activity.become("error", "; ".join(filter(None, (message.reason, self._node.plugins.missing()))))
        elif isinstance(message, Leave):
            raise ChannelClosed("the coordinator left", message.reason)
        elif isinstance(message, Error):
            raise _farewell(message)
        else:
            raise ProtocolError(f"the coordinator sent a {message.TYPE}")

    def _pass_to_hop(self, packet: Packet) -> None:
        """A hop that is not here belonged to a route that has just ended."""
        message = packet.message
        assert isinstance(message, (Run, CacheCommand, ConnectPeer))
        hop = self._hops.get(message.hop)
        if isinstance(hop, Hop):
            if isinstance(message, ConnectPeer):
                hop.connect_upstream(message)
            else:
                hop.put(packet)

    async def _begin(self, order: Assignment | StandBy, nursery: trio.Nursery) -> None:
        if order.hop in self._hops:
            raise ProtocolError(f"a second {order.TYPE} came for the hop {order.hop}")
        if len(self._hops) >= MAX_HOPS:
            await self._link.send(LoadFailed(order.hop, f"this node has {MAX_HOPS} hops already"))
            return
        if isinstance(order, Assignment):
            hop: Hop | Preparation = Hop(self._node, self._link, self._report, order, self._show)
        else:
            hop = Preparation(self._node, self._link, self._report, order)
        self._hops[order.hop] = hop
        self._show()
        nursery.start_soon(self._run, order.hop, hop)

    async def _run(self, number: int, hop: Hop | Preparation) -> None:
        try:
            await hop.run()
        finally:
            del self._hops[number]
        self._show(hop.failure)

    def _show(self, failure: str = "") -> None:
        """The newest hop, or what loads to stand by; without any, why the last one failed."""
        activity = self._node.activity
        activity.weight_bytes = self._node.keeper.nbytes
        if self._hops:
            newest = max(reversed(self._hops.values()), key=lambda hop: isinstance(hop, Hop))
            activity.model = newest.model
            activity.become(newest.state, layers=newest.layers)
        elif failure:
            activity.become("error", failure)
        else:
            activity.become("spare")

    async def _look_again(self) -> None:
        """Whoever serves nobody for having become slow is not taken to be slow for ever."""
        node = self._node
        while True:
            await trio.sleep(LOOK_SECONDS)
            if self._hops or node.compute.is_busy:
                continue
            speed = await node.compute.run(speed_now, node.device)
            if speed.row >= AS_FAST * node.speed.row and node.times.forget_serving():
                self._report.changed()

    def _serving(self) -> list[Hop]:
        return [hop for hop in self._hops.values() if isinstance(hop, Hop)]

    async def _answer_keep(self, let_go: bool) -> None:
        if let_go:
            await trio.to_thread.run_sync(give_back_memory, self._node.device)
        await self._report.tell(layers_changed=let_go)

    def _assignment(self, number: int) -> Assignment | None:
        hop = self._hops.get(number)
        return hop.assignment if isinstance(hop, Hop) else None

    async def _accept_peer(self, channel: Channel) -> None:
        async with accept_downstream(channel, self._assignment, self._node.identity) as (link, assignment):
            hop = self._hops.get(assignment.hop)
            if isinstance(hop, Hop):
                await hop.hand_on_over(link)


def _farewell(message: Error) -> CoreError:
    """Two nodes of one id would push each other out for ever: the earlier one gives way."""
    if message.code == ErrorCode.REPLACED:
        return ConfigError(
            "another node took this one's place",
            message.message,
            "give each a --node-id of its own, and machines that joined by invite each a --state-dir of its own",
        )
    if message.code == ErrorCode.REMOVED:
        return TrustError("this machine is no member any more", message.message)
    return ChannelClosed("the coordinator ended the link", message.message)


def hello(node: Node, peer_hosts: list[str], peer_port: int) -> Hello:
    """What this node offers. Memory that layers hold counts as free: others can take their place.

    Of what its owner's bound allows no more is offered than may be filled of what is free.
    """
    free = free_memory(node.device) + node.keeper.nbytes
    return Hello(
        protocol=PROTOCOL_VERSION,
        node_id=node.node_id,
        hostname=socket.gethostname()[:256],
        core_version=core.__version__,
        selected_device=str(node.device),
        max_memory_bytes=node.max_memory,
        free_memory=free,
        speed=node.speed.row,
        chunk_speed=node.speed.chunk,
        layer_times=layer_times(node),
        holdings=node.keeper.holdings(),
        on_disk=node.disk.told,
        load_speed=node.disk.speed,
        labels=list(node.labels),
        plugins=installed(node.plugins),
        installer=installer(),
        peer_hosts=peer_hosts,
        peer_port=peer_port,
        paused=clipped(node.duty.paused),
        local_token=node.local_token,
        certificate=node.identity.certificate,
    )
