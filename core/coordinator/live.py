"""The coordinator behind its front: serves nodes, opens the model, loads the head, keeps a route alive."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from core.coordinator.admission import Admission
from core.coordinator.builder import RouteBuilder
from core.coordinator.door import open_door
from core.coordinator.generator import Generator, node_statuses
from core.coordinator.head import Head
from core.coordinator.local_nodes import LOCAL_PREFIX, run_local_nodes
from core.coordinator.members import Member, Members
from core.coordinator.referee import Referee
from core.coordinator.scheduler import Scheduler
from core.coordinator.server import NodeServer
from core.coordinator.session import Session
from core.coordinator.settings import CoordinatorSettings
from core.coordinator.supervisor import Supervisor
from core.coordinator.telemetry import Telemetry, gauge, status_of
from core.discovery.advert import Advert
from core.discovery.multicast import keep_announcing
from core.errors import ConfigError
from core.interfaces.checkpoint import Progress
from core.interfaces.engine import ClusterStatus
from core.interfaces.telemetry import KVStatus, Metric
from core.plugins import PluginHost
from core.protocol.codec import Packet
from core.protocol.messages import PROTOCOL_VERSION, Leave
from core.runtime.compute import ComputeThread, open_compute_thread
from core.runtime.device import free_memory, pick, set_up_torch, torch_dtype
from core.runtime.grammar import Grammars
from core.runtime.manifest import Manifest
from core.runtime.model import Model, Precision, choose_wire
from core.runtime.tokenizer import Tokenizer
from core.trust.identity import Identity
from core.trust.serving import Serving

_log = logging.getLogger(__name__)
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where this machine itself dials what listens on all its addresses."""


class Note(Protocol):
    """Told, from any thread, what the coordinator is at, with bytes done and in all where there are any."""

    def __call__(self, phase: str, progress: tuple[int, int] | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    precision: Precision
    tokenizer: Tokenizer
    head: Head
    manifest: Manifest


class Live:
    """Made in any thread, for it asks the devices; all else in trio's."""

    def __init__(self, settings: CoordinatorSettings, plugins: PluginHost, note: Note) -> None:
        self.generator: Generator | None = None
        self._settings = settings
        self._plugins = plugins
        self._note = note
        self._members = Members()
        self.telemetry = Telemetry()
        self._supervisor: Supervisor | None = None
        # Asked for before anything is opened: a name that isn't there is an error at once.
        self._quantizer = plugins.quantizers.get(settings.quant)
        self._dtype = settings.dtype or self._quantizer.compute
        self._planner = plugins.planners.get(settings.planner)
        self._transport = plugins.transports.get(settings.transport)
        self._device = pick(settings.device)
        self._free_at_start = free_memory(self._device)

    @asynccontextmanager
    async def serving_nodes(self) -> AsyncIterator[int]:
        """Nodes can join meanwhile, on the port that this yields; local ones are started."""
        end = trio.Event()
        async with trio.open_nursery() as nursery:
            try:
                yield await nursery.start(self._serve_nodes, end)
            finally:
                end.set()

    async def _serve_nodes(self, end: trio.Event, *, task_status: trio.TaskStatus[int]) -> None:
        """Until `end`, also where it is cancelled before: then all members are told, and let go."""
        settings = self._settings
        with trio.CancelScope(shield=True):
            async with open_door(settings.node_host, settings.state_dir) as door, trio.open_nursery() as nursery:
                server = NodeServer(self._members, self, door)
                listen = partial(self._transport.listen, settings.node_host, settings.node_port, server.serve)
                port: int = await nursery.start(partial(listen, credentials=door.credentials))
                place = Serving(port, settings.advertise or _advertised(settings.node_host))
                await door.announce(place)
                if settings.announce and door.identity is not None:
                    nursery.start_soon(self._be_found, place, door.identity)
                nursery.start_soon(door.watch, self._members)
                if settings.local_nodes:
                    nursery.start_soon(run_local_nodes, *self._local_command(port))
                task_status.started(port)
                await end.wait()
                await self._members.say_goodbye(Leave("its host ended it"))
                nursery.cancel_scope.cancel()

    async def _be_found(self, place: Serving, identity: Identity) -> None:
        try:
            hosts = await trio.to_thread.run_sync(place.reachable_hosts)
        except ConfigError as error:
            _log.warning("this cluster can't be found on the local network: %s", error)
            return
        name = self._settings.served_model_name
        await keep_announcing(Advert(name, hosts, place.port, identity.fingerprint, PROTOCOL_VERSION))

    async def run(self) -> None:
        settings = self._settings
        # The checkpoint is closed after the thread has ended that reads it.
        with ExitStack() as stack:
            async with open_compute_thread("head") as compute:
                await compute.run(set_up_torch, settings.threads)
                self._note("opening the model")
                model = await compute.run(stack.enter_context, Model.open(settings.source, self._plugins))
                loaded = await compute.run(self._load, model)
                await self._serve(model, loaded, compute)

    async def _serve(self, model: Model, loaded: _Loaded, compute: ComputeThread) -> None:
        referee = Referee(model, loaded.precision, self._device)
        builder = RouteBuilder(self._settings, model, loaded.precision, loaded.head, compute, loaded.manifest, referee)
        admission = Admission(
            max_sessions=self._settings.max_sessions,
            keeps=self._settings.prefix_cache,
            rolls_back=model.spec.rolls_back,
            telemetry=self.telemetry,
        )
        scheduler = Scheduler(loaded.head, compute, admission, self.telemetry)
        self._supervisor = Supervisor(
            self._settings,
            self._members,
            self._planner,
            builder,
            self._free_at_start,
            self._sessions,
            scheduler.serve,
        )
        self.generator = Generator(
            model=model,
            precision=loaded.precision,
            tokenizer=loaded.tokenizer,
            grammars=Grammars(loaded.tokenizer),
            supervisor=self._supervisor,
            scheduler=scheduler,
            telemetry=self.telemetry,
            max_context=self._settings.max_context,
            speculates=self._settings.speculation,
        )
        await self._supervisor.run()

    def _sessions(self) -> int:
        return self.generator.sessions if self.generator else 0

    def _load(self, model: Model) -> _Loaded:
        """In the compute thread. Raises ConfigError where the head does not fit into this machine."""
        settings, checkpoint = self._settings, model.checkpoint
        wire = choose_wire(settings.wire_dtype, self._dtype, checkpoint)
        precision = Precision(self._quantizer, self._dtype, wire, settings.keep_head)
        need, free = model.ends_bytes(precision), free_memory(self._device)
        if need > free:
            raise ConfigError(
                "the embedding and head do not fit into this machine",
                f"they take {need / 1e9:.1f} GB and {self._device} has {free / 1e9:.1f} GB free",
                "run the coordinator on a larger machine, or use a smaller model",
            )
        model.fetch_ends(self._noting("downloading embedding and head"))
        ends = model.load_ends(precision, self._device, self._noting("loading embedding and head"))
        self._note("loading the tokenizer")
        tokenizer = Tokenizer(checkpoint.tokenizer(), eos_token_ids=_eos_ids(model))
        head = Head(ends, model.spec.hidden_size, self._device, torch_dtype(precision.wire), tokenizer)
        manifest = Manifest.of(model, self._noting("hashing the model's files"))
        return _Loaded(precision, tokenizer, head, manifest)

    def _noting(self, phase: str) -> Progress:
        return lambda done, total: self._note(phase, (done, total))

    def status(self, phase: str, progress: tuple[int, int] | None) -> ClusterStatus:
        settings, supervisor, generator = self._settings, self._supervisor, self.generator
        precision = generator.precision if generator else None
        return ClusterStatus(
            model=settings.served_model_name,
            state=supervisor.state if supervisor else "waiting",
            detail=supervisor.detail if supervisor else phase,
            progress=None if supervisor else progress,
            required_nodes=supervisor.required if supervisor else settings.min_nodes,
            ready_nodes=supervisor.ready_nodes() if supervisor else 0,
            route_epoch=supervisor.epoch if supervisor else 0,
            layers=generator.model.spec.layers if generator else 0,
            sessions=self._sessions(),
            tokens_per_second=self.telemetry.rate.per_second(),
            quant=settings.quant,
            dtype=self._dtype,
            wire_dtype=precision.wire if precision else settings.wire_dtype,
            nodes=node_statuses(self._members),
            left_out=self._left_out(),
            kv=self._kv(),
            hops=self.telemetry.hops(),
            wire_ms=self.telemetry.wire.value or 0.0,
            generations=tuple(map(status_of, self._generations())),
        )

    def metrics(self) -> Iterator[Metric]:
        yield from self.telemetry.metrics()
        kv, sessions = self._kv(), self._generations()
        waiting = sum(not session.admitted.is_set() for session in sessions)
        yield gauge("core_sessions_running", "Generations that run.", len(sessions) - waiting)
        yield gauge("core_sessions_waiting", "Generations that wait for room.", waiting)
        yield gauge("core_kv_tokens", "Tokens of KV cache that the route's memory holds.", kv.tokens)
        yield gauge("core_kv_reserved_tokens", "Of those, reserved by running sessions.", kv.reserved)
        yield gauge("core_kv_kept_tokens", "Of those, kept of ended sessions.", kv.kept)
        yield gauge("core_nodes", "Nodes that have joined.", len(self._members.all()))
        yield gauge(
            "core_ready", "1 while the cluster serves.", bool(self._supervisor and self._supervisor.state == "ready")
        )

    def _kv(self) -> KVStatus:
        if self.generator is None:
            return KVStatus()
        budget = self.generator.scheduler.admission.budget
        return KVStatus(budget.tokens, budget.reserved, budget.kept)

    def _generations(self) -> list[Session]:
        if self.generator is None:
            return []
        admission = self.generator.scheduler.admission
        return [*admission.running.values(), *admission.waiting]

    def _left_out(self) -> dict[str, str]:
        """Who holds no layers, and why: by the plan, for having joined after it, or for being paused."""
        planned = dict(self._supervisor.left_out) if self._supervisor else {}
        without = [member for member in self._members.all() if member.state in ("spare", "paused") and member.detail]
        return planned | {member.node_id: member.detail for member in without}

    async def take(self, member: Member, packet: Packet) -> None:
        if self._supervisor is not None:
            await self._supervisor.take(member, packet)

    def member_joined(self, member: Member) -> None:
        if self._supervisor is not None:
            self._supervisor.member_joined(member)

    def member_left(self, member: Member) -> None:
        if self._supervisor is not None:
            self._supervisor.member_left(member)

    def _local_command(self, port: int) -> tuple[list[str], list[str]]:
        settings = self._settings
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
    """The one address that nodes can join at; none where all of this machine's will do."""
    return () if node_host in LOOPBACK_OF else (node_host,)


def _eos_ids(model: Model) -> list[int]:
    """All that end a generation: of config.json and generation_config.json, each one id or a list."""
    ids: list[int] = []
    for config in (model.checkpoint.config, model.checkpoint.generation_config):
        value = config.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return ids
