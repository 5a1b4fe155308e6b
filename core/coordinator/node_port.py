"""Where nodes join: the port that they dial, who may join, and this machine's own nodes."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import trio

from core.coordinator.enrolment import open_enrolment
from core.coordinator.local_nodes import LOCAL_PREFIX, run_local_nodes
from core.coordinator.members import Members
from core.coordinator.routes import Routes
from core.coordinator.server import NodeServer
from core.coordinator.settings import CoordinatorSettings
from core.discovery.advert import Advert
from core.discovery.multicast import keep_announcing
from core.errors import ConfigError, CoreError
from core.interfaces.transport import Credentials, Handler, Transport
from core.protocol.messages import PROTOCOL_VERSION, Leave
from core.trust.identity import Identity
from core.trust.serving import ANY_IPV4, Serving

_log = logging.getLogger(__name__)
LISTEN_AGAIN_SECONDS = 2.0
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where this machine itself dials what listens on all its addresses."""


class _FirstPort(trio.TaskStatus[int]):
    """Tells the first port that is told."""

    def __init__(self, told: trio.TaskStatus[int]) -> None:
        self.port = 0
        self._told = told

    def started(self, value: int | None = None) -> None:
        if not self.port:
            assert value is not None
            self.port = value
            self._told.started(value)


@dataclass(frozen=True, slots=True)
class NodePort:
    settings: CoordinatorSettings
    transport: Transport
    members: Members
    routes: Routes

    @asynccontextmanager
    async def open(self) -> AsyncIterator[int]:
        """Nodes can join meanwhile, on the port that this yields; local ones are started."""
        end = trio.Event()
        async with trio.open_nursery() as nursery:
            try:
                yield await nursery.start(self._serve, end)
            finally:
                end.set()

    async def _serve(self, end: trio.Event, *, task_status: trio.TaskStatus[int]) -> None:
        """Until `end`, also if it is cancelled before: then all members are told, and let go."""
        settings = self.settings
        with trio.CancelScope(shield=True):
            async with (
                open_enrolment(settings.node_host, settings.state_dir) as enrolment,
                trio.open_nursery() as nursery,
            ):
                local_token = secrets.token_bytes(32)
                server = NodeServer(self.members, self.routes, enrolment, local_token, settings.local_nodes)
                listen = partial(self._keep_listening, server.serve, enrolment.credentials)
                port: int = await nursery.start(listen)
                hosts = settings.advertise or _advertised(settings.node_host)
                listens_on = settings.node_host if settings.node_host in LOOPBACK_OF else ANY_IPV4
                place = Serving(port, hosts, settings.transport, listens_on)
                await enrolment.announce(place)
                if settings.announce and enrolment.identity is not None:
                    nursery.start_soon(self._be_found, place, enrolment.identity)
                nursery.start_soon(enrolment.watch, self.members)
                if settings.local_nodes:
                    nursery.start_soon(run_local_nodes, *_local_command(settings, port), local_token)
                task_status.started(port)
                await end.wait()
                await self.members.say_goodbye(Leave("its host ended it"))
                nursery.cancel_scope.cancel()

    async def _keep_listening(
        self, serve: Handler, credentials: Credentials | None, *, task_status: trio.TaskStatus[int]
    ) -> None:
        """A transport that fails once it has listened begins again, on the same port, and members come back."""
        status = _FirstPort(task_status)
        while True:
            port = status.port or self.settings.node_port
            try:
                await self.transport.listen(
                    self.settings.node_host, port, serve, credentials=credentials, task_status=status
                )
            except CoreError as error:
                if not status.port:
                    raise
                _log.error("%s; it listens again", error)
            await trio.sleep(LISTEN_AGAIN_SECONDS)

    async def _be_found(self, place: Serving, identity: Identity) -> None:
        try:
            hosts = await trio.to_thread.run_sync(place.reachable_hosts)
        except ConfigError as error:
            _log.warning("this cluster can't be found on the local network: %s", error)
            return
        name = self.settings.served_model_name
        own = (identity.fingerprint, PROTOCOL_VERSION, place.transport)
        await keep_announcing(Advert(name, hosts, place.port, *own))


def _local_command(settings: CoordinatorSettings, port: int) -> tuple[list[str], list[str]]:
    """The ids of this machine's own nodes, and the options that they are started with."""
    host = LOOPBACK_OF.get(settings.node_host, settings.node_host)
    options = ["--cluster-host", host, "--cluster-port", str(port), "--device", settings.device]
    if settings.node_host in LOOPBACK_OF:
        options += ["--peer-host", settings.node_host]
    options += ["--transport", settings.transport]
    # What a local node has to say at level info, the coordinator says too.
    level = logging.root.level if logging.root.level != logging.INFO else logging.WARNING
    options += ["--log-level", logging.getLevelName(level).lower()]
    if settings.threads is not None:
        options += ["--threads", str(settings.threads)]
    if settings.compiles:
        options.append("--compile")
    if settings.source.cache_dir is not None:
        options += ["--hf-cache-dir", str(settings.source.cache_dir)]
    return [f"{LOCAL_PREFIX}{index + 1}" for index in range(settings.local_nodes)], options


def _advertised(node_host: str) -> tuple[str, ...]:
    """The one address that nodes can join at; none if all of this machine's will do."""
    return () if node_host in LOOPBACK_OF else (node_host,)
