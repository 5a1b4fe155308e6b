"""Runs a described cluster: the real coordinator over simulated machines, wires and clients, on trio's mock clock."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

import torch
import trio
from trio.testing import MockClock

from core.coordinator.generator import Generator
from core.coordinator.live import Live
from core.coordinator.readiness import State
from core.coordinator.settings import CoordinatorSettings
from core.errors import CoreError, sole_error
from core.interfaces.checkpoint import Source
from core.interfaces.quantizer import Quantizer
from core.parity import as_bytes, run_operations
from core.plugins import PluginHost
from core.runtime.model import Precision
from core.testing.simulator.compute import SimulatedCompute
from core.testing.simulator.description import COORDINATOR, Description, Event, Happening
from core.testing.simulator.load import Clients
from core.testing.simulator.model import DTYPE, loaded_model
from core.testing.simulator.network import MachineTransport, Network
from core.testing.simulator.node import SimulatedNode
from core.testing.simulator.report import Report
from core.testing.simulator.simulated_time import put_forward, simulated_time
from core.trust.identity import Identity

POLL_SECONDS = 0.1


def simulate(description: Description) -> Report:
    """Call it where no trio runs. Raises CoreError if the cluster is not ready within the description's `limit`.

    One description brings one report: see core.testing.simulator.simulated_time.
    """
    try:
        with simulated_time(description.seed):
            return trio.run(_simulate, description, clock := MockClock(), clock=clock)
    except BaseExceptionGroup as group:
        raise sole_error(group) from None


async def _simulate(description: Description, clock: MockClock) -> Report:
    plugins = PluginHost.installed()
    world = _World(description, plugins)
    live = Live(_settings(description), plugins, lambda phase, progress=None: None, lambda: None)
    model = loaded_model(description.model, plugins.quantizers.get(live.settings.quant))
    world.parity = _parity(model.precision.quantizer)
    trio.lowlevel.spawn_system_task(put_forward, clock)
    async with live.node_port.open() as world.port, trio.open_nursery() as nursery:
        world.nursery = nursery
        nursery.start_soon(world.compute.run_jobs)
        world.start(*(name for name, machine in description.named_machines() if machine.joins is None))
        while len(live.members.all()) < len(world.nodes):
            await live.members.wait_change(live.members.changes)
        nursery.start_soon(live._serve, model, world.compute)
        ready_after = await _ready(live, description.limit)
        report = await world.serve(live, ready_after)
        nursery.cancel_scope.cancel()
    return report


async def _ready(live: Live, limit: float) -> float:
    while live.supervisor is None or live.supervisor.state is not State.READY:
        await trio.sleep(POLL_SECONDS)
        if trio.current_time() > limit:
            raise CoreError("the cluster did not get ready", live.supervisor.detail if live.supervisor else "")
    return trio.current_time()


def _settings(description: Description) -> CoordinatorSettings:
    settings: dict[str, Any] = {"speculation": False, "quant": "fp16", **description.settings}
    return CoordinatorSettings(
        source=Source("simulated"),
        served_model_name="simulated",
        node_port=0,
        dtype=DTYPE,
        device="cpu",
        transport=MachineTransport.name,
        **settings,
    )


@cache
def _parity(quantizer: Quantizer) -> Mapping[str, bytes]:
    """What every machine answers to the comparison with the coordinator: what this one computes."""
    return as_bytes(run_operations(Precision(quantizer, DTYPE, DTYPE), torch.device("cpu")))


class _World:
    """The machines, their wires and what becomes of them."""

    def __init__(self, description: Description, plugins: PluginHost) -> None:
        self.compute = SimulatedCompute(description.coordinator.head_ms)
        self.nodes: dict[str, SimulatedNode] = {}
        self.nursery: trio.Nursery
        self.port = 0
        self.parity: Mapping[str, bytes] = {}
        self._description = description
        self._machines = dict(description.named_machines())
        self._identity = Identity.fresh()
        self._network = Network(description.wire, self._message_seconds, Random(description.seed), DTYPE.itemsize)
        plugins.transports.add(MachineTransport.name, MachineTransport(self._network, COORDINATOR))

    def start(self, *names: str) -> None:
        """Each machine's process."""
        for name in names:
            self.nodes[name] = SimulatedNode(
                name,
                self._machines[name],
                round(self._description.model.layer_mb * 1e6),
                MachineTransport(self._network, name),
                self._identity,
                self.parity,
                Random(f"{self._description.seed} {name}"),
                busy=self.nodes[name].busy if name in self.nodes else 0.0,
            )
            self.nursery.start_soon(self.nodes[name].run, self.port)

    async def serve(self, live: Live, ready_after: float) -> Report:
        """All requests, and all that happens meanwhile."""
        description, generator = self._description, live.generator
        assert generator is not None
        clients = Clients(description.load, Random(description.seed))
        self.compute.busy = 0.0
        with trio.move_on_at(ready_after + description.limit):
            async with trio.open_nursery() as nursery:
                for event in description.events:
                    nursery.start_soon(self._befall, event, generator)
                for name, machine in self._machines.items():
                    if machine.joins is not None:
                        nursery.start_soon(self._join, name, machine.joins)
                await clients.run(generator)
                nursery.cancel_scope.cancel()
        return self._report(live, clients, ready_after)

    def _report(self, live: Live, clients: Clients, ready_after: float) -> Report:
        assert live.generator is not None and live.supervisor is not None
        ended = max((stream.tokens[-1] for stream in clients.streams if stream.tokens), default=ready_after)
        seconds = ended - ready_after
        serving = live.generator.router.serving
        busy = {name: node.busy for name, node in self.nodes.items()} | {COORDINATOR: self.compute.busy}
        counted = {metric.name: metric.samples[0].value for metric in live.telemetry.metrics() if metric.samples}
        return Report(
            title=self._description.title,
            streams=clients.streams,
            seconds=seconds,
            ready_after=ready_after,
            layers={hop.member.node_id: hop.layers for hop in serving.route.hops} if serving else {},
            busy={name: spent / seconds if seconds else 0.0 for name, spent in busy.items()},
            left_out=dict(live.supervisor.left_out),
            routes=live.supervisor.epoch,
            recoveries=round(counted["core_recoveries"]),
            outage_seconds=counted["core_recovery_seconds"],
        )

    def _message_seconds(self, name: str) -> float:
        return (self._machines.get(name) or self._description.coordinator).message_ms / 1000

    async def _join(self, name: str, seconds: float) -> None:
        await trio.sleep(seconds)
        self.start(name)

    async def _befall(self, event: Event, generator: Generator) -> None:
        await trio.sleep(event.at)
        name = event.machine
        if isinstance(name, int):
            serving = generator.router.serving
            if serving is None:
                return
            name = serving.route.hops[name % len(serving.route.hops)].member.node_id
        node, unplugged = self.nodes[name], self._network.unplugged
        match event.what:
            case Happening.DIES:
                node.end()
            case Happening.VANISHES:
                unplugged.add(name)
            case Happening.RETURNS if name in unplugged:
                unplugged.remove(name)
            case Happening.RETURNS:
                self.start(name)
            case Happening.LEAVES:
                node.pause("its owner ends it", leaves=True)
            case Happening.PAUSES:
                node.pause("its owner needs it")
            case Happening.RESUMES:
                node.pause("")
            case Happening.SLOWS:
                node.factor = event.factor
