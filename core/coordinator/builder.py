"""From a plan to a route: assign, load, link, and prove with a real token."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeVar

import trio

from core.coordinator.head import Head
from core.coordinator.local_nodes import LOCAL_PREFIX
from core.coordinator.members import Member
from core.coordinator.referee import Referee
from core.coordinator.route import Hop, Route
from core.coordinator.settings import CoordinatorSettings
from core.errors import ChannelClosed, CoreError, RouteError, StageError, sole_error
from core.interfaces.planner import Plan
from core.protocol.messages import (
    Assignment,
    ClearCache,
    ConnectPeer,
    LoadComplete,
    LoadFailed,
    LoadProgress,
    PeerConnected,
    Proof,
    RunPrefill,
    Segment,
)
from core.runtime.compute import ComputeThread
from core.runtime.manifest import Manifest
from core.runtime.model import Model, Precision

STALL_SECONDS = 180.0
"""A node that loads says how far it is; one that says nothing for this long has failed."""
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
    precision: Precision
    head: Head
    compute: ComputeThread
    manifest: Manifest
    referee: Referee

    async def build(
        self, epoch: int, plan: Plan, members: Mapping[str, Member], route_made: Callable[[Route], None]
    ) -> Route:
        """A route that a real token has passed through. `route_made` gets it before any message can come for it.

        Raises RouteError (LoadRefused where a node said no) naming the node.
        """
        hops = [Hop(members[stage.node_id], range(stage.start, stage.end)) for stage in plan.stages]
        route = Route(epoch, hops)
        route_made(route)
        tokens = [secrets.token_bytes(16) for _ in hops]
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_fail_when_broken, route)
                await self._load_all(route, tokens)
                for upstream, hop, token in zip(hops, hops[1:], tokens, strict=False):
                    hop.member.upstream_link = await self._connect(epoch, upstream.member, hop.member, token)
                await self._prove(route)
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole_error(group) from None
        return route

    async def _load_all(self, route: Route, tokens: list[bytes]) -> None:
        async with trio.open_nursery() as nursery:
            for index, hop in enumerate(route.hops):
                downstream = route.hops[index + 1].member if index + 1 < len(route.hops) else None
                assignment = self._assignment(route.epoch, hop.layers, tokens[index], downstream)
                nursery.start_soon(self._load, hop, assignment)
                nursery.start_soon(self._compute, self.referee.prepare, assignment.parity_layer)

    async def _load(self, hop: Hop, assignment: Assignment) -> None:
        member = hop.member
        member.become("loading")
        member.layers, member.upstream_link = hop.layers, ""
        await _send(member, assignment)
        while True:
            answer = await member.answer(assignment.epoch, LoadProgress, LoadComplete, LoadFailed, within=STALL_SECONDS)
            if isinstance(answer, LoadFailed):
                member.fail(answer.reason)
                raise LoadRefused(
                    f"node {member.node_id!r} could not load layers [{hop.layers.start}, {hop.layers.stop})",
                    answer.reason,
                    node=member.node_id,
                )
            if isinstance(answer, LoadComplete):
                await self._compare(member, assignment, answer)
                member.become("loaded")
                member.weight_bytes = answer.weight_bytes
                member.kv_tokens = answer.kv_tokens // self._sharing(member)
                return

    def _sharing(self, member: Member) -> int:
        """How many nodes fill the memory that `member` has measured."""
        return self.settings.local_nodes if member.node_id.startswith(LOCAL_PREFIX) else 1

    async def _compare(self, member: Member, assignment: Assignment, loaded: LoadComplete) -> None:
        difference = await self._compute(self.referee.difference, loaded.parity, assignment.parity_layer)
        if difference:
            member.fail(f"it computes other results than the coordinator: {difference}")
            raise LoadRefused(
                f"node {member.node_id!r} computes other results than the coordinator",
                difference,
                "see `core doctor` there; a driver or torch itself may be broken",
                node=member.node_id,
            )

    async def _connect(self, epoch: int, upstream: Member, member: Member, token: bytes) -> str:
        """How `upstream` reaches `member`: "direct", or "relayed" with the reason."""
        hosts, port = _hosts_of(upstream, member), upstream.hello.peer_port
        await _send(member, ConnectPeer(epoch, hosts, port, token, upstream.fingerprint))
        answer = await member.answer(epoch, PeerConnected, within=LINK_SECONDS)
        return "direct" if answer.direct else f"relayed by the coordinator: {answer.reason}"

    async def _prove(self, route: Route) -> None:
        hidden = await self._compute(self.head.embed, [0])
        segment = Segment(session=PROOF_SESSION, position=0, rows=1, outputs=1)
        try:
            answer = await route.run(RunPrefill(route.epoch, [segment], hidden))
            await self._compute(self.head.check, answer.hidden)
        except RouteError:
            raise
        except CoreError as error:
            raise self._failed_proof(route, error) from error
        await route.order(ClearCache(route.epoch, [PROOF_SESSION]))
        for hop in route.hops:
            hop.member.become("ready")

    async def _compute(self, call: Callable[..., T], *args: object) -> T:
        """In the compute thread, where torch and plugins may raise anything."""
        try:
            return await self.compute.run(call, *args)
        except CoreError:
            raise
        except Exception as error:
            _log.exception("the coordinator's head failed")
            raise RouteError("the coordinator's head failed", f"{type(error).__name__}: {error}") from error

    def _failed_proof(self, route: Route, error: CoreError) -> RouteError:
        """A node whose stage is at fault is left out of the next plans, as one is that can't load."""
        title, reason = "the route failed its proof", str(error)
        for hop in route.hops:
            if isinstance(error, StageError) and error.node == hop.member.node_id:
                hop.member.fail(reason)
                return LoadRefused(title, reason, node=error.node)
        return RouteError(title, reason)

    def _assignment(self, epoch: int, layers: range, token: bytes, downstream: Member | None) -> Assignment:
        proof = self.manifest.proof(layers)
        return Assignment(
            epoch=epoch,
            model_id=self.settings.source.model,
            revision=self.model.checkpoint.revision or self.settings.source.revision,
            architecture=self.model.architecture.name,
            quant=self.precision.quantizer.name,
            compute_dtype=self.precision.compute,
            wire_dtype=self.precision.wire,
            layer_start=layers.start,
            layer_end_exclusive=layers.stop,
            is_last=downstream is None,
            total_weight_bytes=sum(self.model.layer_bytes(layer, self.precision) for layer in layers),
            parity_layer=self.referee.layer_of(layers),
            proof=Proof(proof.manifest, dict(proof.files), dict(proof.rests), list(proof.layers)),
            link_token=token,
            downstream=downstream.fingerprint if downstream else None,
        )


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


async def _send(member: Member, message: Assignment | ConnectPeer) -> None:
    try:
        await member.link.send(message)
    except ChannelClosed as error:
        raise member.lost(error.reason) from None


async def _fail_when_broken(route: Route) -> None:
    await route.broken.wait()
    assert route.failure is not None
    raise route.failure
