"""From a plan to a route: assign, load, link, and prove with a real token."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeVar

import trio

from core.coordinator.head import HEAD_FAILED, Head
from core.coordinator.hop import DIRECT, Hop, HopState
from core.coordinator.members import Member
from core.coordinator.parity_check import ParityCheck
from core.coordinator.route import Route
from core.coordinator.settings import CoordinatorSettings
from core.errors import CoreError, RouteError, StageError, sole_error
from core.protocol.fields import Proof, Segment, Shard
from core.protocol.messages import (
    Assignment,
    ClearCache,
    ConnectPeer,
    LoadComplete,
    LoadFailed,
    LoadProgress,
    PeerConnected,
    RunPrefill,
    StandBy,
)
from core.runtime.compute import ComputeThread, explained
from core.runtime.layer_cache import capacity
from core.runtime.manifest import Manifest
from core.runtime.model import Model

STALL_SECONDS = 180.0
"""A node that loads says how far it is; one that says nothing for this long has failed."""
MIN_LOAD_SPEED = 250_000
"""Bytes of a checkpoint's layers per second: a node that brings them more slowly has failed, whatever it says."""
MIN_ROOM_TOKENS = capacity(1)
"""A route that has memory for fewer tokens of KV cache serves nobody: it is what a session of one token takes."""
_FREE_MEMORY = "close programs there, or give it more memory"
LINK_SECONDS = 30.0
PROOF_SESSION = 0
T = TypeVar("T")
_log = logging.getLogger(__name__)


class LoadRefused(RouteError):
    """A node could not load or compute its layers: it is left out of the next plans for a while."""


@dataclass(frozen=True, slots=True)
class RouteBuilder:
    settings: CoordinatorSettings
    model: Model
    head: Head
    compute: ComputeThread
    manifest: Manifest
    parity_check: ParityCheck

    async def build(self, route: Route) -> None:
        """Has the hops of `route` load their layers, links them, and sees a real token pass through all of them.

        Raises RouteError (LoadRefused if a node said no) naming the node.
        """
        tokens = [secrets.token_bytes(16) for _ in route.hops]
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_fail_when_broken, route)
                await self._load_all(route, tokens)
                _refuse_without_room(route)
                for upstream, hop, token in zip(route.hops, route.hops[1:], tokens, strict=False):
                    hop.link = await self._connect(upstream, hop, token)
                await self._prove(route)
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole_error(group) from None

    async def stand_in(self, hop: Hop, *, in_memory: bool) -> None:
        """Has the hop's member bring the files of its layers, and with `in_memory` hold them, for a later route.

        Raises RouteError if that fails.
        """
        shard = self._shard(hop)
        await hop.send(StandBy(hop.number, shard, in_memory))
        loaded = await self._loaded(hop)
        if in_memory:
            await self._compute(self.parity_check.prepare, shard.parity_layer)
            await self._compare(hop, shard, loaded)
        hop.state = HopState.LOADED

    async def _load_all(self, route: Route, tokens: list[bytes]) -> None:
        async with trio.open_nursery() as nursery:
            for index, hop in enumerate(route.hops):
                downstream = route.hops[index + 1] if index + 1 < len(route.hops) else None
                assignment = self._assignment(hop, tokens[index], downstream)
                nursery.start_soon(self._load, hop, assignment)
                nursery.start_soon(self._compute, self.parity_check.prepare, assignment.shard.parity_layer)

    async def _load(self, hop: Hop, assignment: Assignment) -> None:
        await hop.send(assignment)
        loaded = await self._loaded(hop)
        await self._compare(hop, assignment.shard, loaded)
        hop.state, hop.weight_bytes = HopState.LOADED, loaded.weight_bytes
        told = (hop.member.node_id, hop.span, loaded.read_bytes, loaded.seconds)
        _log.info("node %s has layers %s: %d bytes read in %.2f s", *told)

    async def _loaded(self, hop: Hop) -> LoadComplete:
        """A node that says how far it is may take its time, within reason."""
        limit = STALL_SECONDS + self.model.stored_bytes(hop.layers) / MIN_LOAD_SPEED
        with trio.move_on_after(limit):
            while True:
                answer = await hop.answer(LoadProgress, LoadComplete, LoadFailed, within=STALL_SECONDS)
                if isinstance(answer, LoadComplete):
                    hop.member.loaded()
                    return answer
                if isinstance(answer, LoadFailed):
                    raise _refused(hop, f"could not load layers {hop.span}", answer.reason)
        raise _refused(hop, f"could not load layers {hop.span}", f"it was not done after {limit:.0f} s")

    async def _compare(self, hop: Hop, shard: Shard, loaded: LoadComplete) -> None:
        difference = await self._compute(self.parity_check.difference, loaded.parity, shard.parity_layer)
        if difference:
            hint = "see `core doctor` there; a driver or torch itself may be broken"
            raise _refused(hop, "computes other results than the coordinator", difference, hint)

    async def _connect(self, upstream: Hop, hop: Hop, token: bytes) -> str:
        """How `upstream` reaches `hop`: "direct", or "relayed" with the reason."""
        dialled = upstream.member
        hosts, port = _hosts_of(dialled, hop.member), dialled.hello.peer_port
        await hop.send(ConnectPeer(hop.number, upstream.number, hosts, port, token, dialled.fingerprint))
        answer = await hop.answer(PeerConnected, within=LINK_SECONDS)
        return DIRECT if answer.direct else f"relayed by the coordinator: {answer.reason}"

    async def is_proven_again(self, route: Route) -> bool:
        """Whether it stands: it fails if a node does whatever it is given, and not one request alone."""
        route.is_doubted = False
        try:
            await self._prove(route)
        except LoadRefused as error:
            route.fail(error)
        except CoreError as error:
            _log.warning("route %d could not be proven again: %s", route.epoch, error)
        return route.failure is None

    async def _prove(self, route: Route) -> None:
        """Has a real token pass through all hops. Raises RouteError (LoadRefused if it is a node's fault)."""
        hidden = await self._compute(self.head.embed, [0])
        segment, first = Segment(session=PROOF_SESSION, position=0, rows=1, outputs=1), route.hops[0].number
        try:
            answer = await route.run(RunPrefill(first, [segment], hidden))
            await self._compute(self.head.check, answer.hidden, route.hops[-1].member.node_id)
        except RouteError:
            raise
        except CoreError as error:
            raise _failed_proof(route, error) from error
        await route.command(ClearCache(first, [PROOF_SESSION]))
        if route.failure is not None:
            raise route.failure
        for hop in route.hops:
            hop.state = HopState.READY

    async def _compute(self, call: Callable[..., T], *args: object) -> T:
        """In the compute thread, where torch and plugins may raise anything."""
        return await explained(self.compute.start(call, *args), HEAD_FAILED, _head_failed)

    def _assignment(self, hop: Hop, token: bytes, downstream: Hop | None) -> Assignment:
        return Assignment(
            hop=hop.number,
            next_hop=downstream.number if downstream else None,
            shard=self._shard(hop),
            wire_dtype=hop.precision.wire,
            kv_dtype=hop.precision.kv,
            link_token=token,
            downstream=downstream.member.fingerprint if downstream else None,
        )

    def _shard(self, hop: Hop) -> Shard:
        layers, precision = hop.layers, hop.precision
        proof = self.manifest.proof(layers)
        return Shard(
            model_id=self.settings.source.model,
            revision=self.model.checkpoint.revision or self.settings.source.revision,
            architecture=self.model.architecture.name,
            quant=precision.quantizer.name,
            compute_dtype=precision.compute,
            layer_start=layers.start,
            layer_end=layers.stop,
            weight_bytes=sum(self.model.layer_bytes(layer, precision) for layer in layers),
            proof=Proof(proof.manifest, dict(proof.files), dict(proof.rests), list(proof.layers)),
            parity_layer=self.parity_check.layer_of(layers),
        )


def _head_failed(error: BaseException) -> RouteError:
    return RouteError(HEAD_FAILED, f"{type(error).__name__}: {error}")


def _refused(hop: Hop, what: str, reason: str, hint: str = "") -> LoadRefused:
    """The member is left out of the next plans for a while, unless it only was to stand in."""
    if not hop.stands_in:
        hop.member.fail(f"it {what}: {reason}" if hint else reason)
    return LoadRefused(f"node {hop.member.node_id!r} {what}", reason, hint, node=hop.member.node_id)


def _refuse_without_room(route: Route) -> None:
    """Raises LoadRefused for a node that, with nothing but the route's layers, has no memory for KV caches."""
    for hop in route.hops:
        reported = hop.member.reported
        loaded = sum(span.end - span.start for holding in reported.holdings for span in holding.layers)
        needed = sum(own.session_cost(MIN_ROOM_TOKENS) for own in route.hops if own.member is hop.member)
        if loaded <= len(hop.layers) and hop.member.hops == [hop] and hop.member.kv_room < needed:
            raise _refused(
                hop,
                "has no memory for KV caches",
                f"{hop.member.kv_room} bytes are left for them beside layers {hop.span}",
                _FREE_MEMORY,
            )


def _failed_proof(route: Route, error: CoreError) -> RouteError:
    """A node whose stage is at fault is left out of the next plans, as one is that can't load."""
    title, reason = "the route failed its proof", str(error)
    for hop in route.hops:
        if isinstance(error, StageError) and error.node == hop.member.node_id:
            hop.member.fail(reason)
            return LoadRefused(title, reason, node=error.node)
    return RouteError(title, reason)


def _hosts_of(upstream: Member, member: Member) -> list[str]:
    """Where `member` can dial `upstream`: one on the coordinator's own machine, where it found the coordinator."""
    if _is_loopback(upstream.link.local_host) and not _is_loopback(member.link.local_host):
        return [member.link.local_host]
    return upstream.hello.peer_hosts


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False  # a transport may have addresses of its own kind


async def _fail_when_broken(route: Route) -> None:
    await route.broken.wait()
    assert route.failure is not None
    raise route.failure
