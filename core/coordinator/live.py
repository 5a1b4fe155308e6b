"""The coordinator behind its front: opens the model, loads its own part of it, and keeps routes alive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from core.coordinator.builder import RouteBuilder
from core.coordinator.generator import Generator
from core.coordinator.journal import Journal
from core.coordinator.loaded_model import LoadedModel, Note, load_model
from core.coordinator.members import Members
from core.coordinator.node_port import NodePort
from core.coordinator.parity_check import ParityCheck
from core.coordinator.planning import Planning
from core.coordinator.requirements import Requirements
from core.coordinator.route import Route
from core.coordinator.router import Router
from core.coordinator.routes import Routes
from core.coordinator.service import RouteService, ServiceParts
from core.coordinator.settings import CoordinatorSettings
from core.coordinator.speeds import Speeds
from core.coordinator.supervisor import Supervisor
from core.coordinator.telemetry import Telemetry
from core.errors import RouteError
from core.plugins import PluginHost
from core.runtime.compute import ComputeThread, open_compute_thread
from core.runtime.device import free_memory, pick, set_up_torch
from core.runtime.grammar import Grammars
from core.runtime.model import Model
from core.runtime.precision_choice import refuse_unknown


class Live:
    """Made in any thread, for it asks the devices; all else in trio's. Nodes join through `node_port`."""

    def __init__(
        self, settings: CoordinatorSettings, plugins: PluginHost, note: Note, on_change: Callable[[], None]
    ) -> None:
        """`note` is told what is done before nodes can serve, `on_change` that its status may be another."""
        self.settings = settings
        self.journal = Journal()
        self.members = Members(self.journal)
        self.routes = Routes()
        self.telemetry = Telemetry(self.journal)
        self.generator: Generator | None = None
        """Once the model is loaded; so is `supervisor`."""
        self.supervisor: Supervisor | None = None
        self._plugins = plugins
        self._note = note
        self._on_change = on_change
        # Asked for before anything is opened: a name that isn't there is an error at once.
        refuse_unknown(settings.quant, plugins.quantizers)
        self._planner = plugins.planners.get(settings.planner)
        self.node_port = NodePort(settings, plugins.transports.get(settings.transport), self.members, self.routes)
        self._device = pick(settings.device)
        self._free_at_start = free_memory(self._device)

    def _state_changed(self) -> None:
        assert self.supervisor is not None
        state, detail, epoch = self.supervisor.state, self.supervisor.detail, self.supervisor.epoch
        self.journal.note(f"{state.value}: {detail}" if detail else f"{state.value}, on route {epoch}")
        self._on_change()

    async def run(self) -> None:
        settings = self.settings
        # The checkpoint is closed after the thread has ended that reads it.
        with ExitStack() as stack:
            async with open_compute_thread("head") as compute:
                await compute.run(set_up_torch, settings.threads)
                self._note("opening the model")
                model = await compute.run(stack.enter_context, Model.open(settings.source, self._plugins))
                parts = (model, settings, self._plugins.quantizers, self._device, self._note)
                await self._serve(await compute.run(load_model, *parts), compute)

    async def _serve(self, loaded: LoadedModel, compute: ComputeThread) -> None:
        settings, model, precision = self.settings, loaded.model, loaded.precision
        parity_check = ParityCheck(model, precision, self._device)
        builder = RouteBuilder(settings, model, loaded.head, compute, loaded.manifest, parity_check)
        planning = Planning(
            settings,
            self._planner,
            model,
            precision,
            loaded.held_as,
            self._free_at_start,
            Speeds.of(model, precision),
            self.routes.wires,
            self.telemetry.times,
            Requirements.of(self._plugins, settings.source, model.architecture.name, precision.quantizer.name),
        )
        self.telemetry.times.begin(loaded.head_seconds)
        router = Router(settings.recovery_time, self.telemetry)
        parts = ServiceParts(loaded.head, compute, self.telemetry, router.queue, settings, model.cuts)

        def service_of(route: Route) -> RouteService:
            self.telemetry.route_began(route)
            return RouteService(route, parts, router.admit, router.move)

        self.supervisor = Supervisor(
            settings,
            self.members,
            self.routes,
            planning,
            builder,
            router,
            service_of,
            self._state_changed,
            self.telemetry.tell_watchers,
        )
        self.generator = Generator(
            model=model,
            precision=precision,
            tokenizer=loaded.tokenizer,
            grammars=Grammars(loaded.tokenizer),
            router=router,
            telemetry=self.telemetry,
            max_context=settings.max_context,
            speculates=settings.speculation,
        )
        try:
            await self.supervisor.run()
        finally:
            router.end_all(RouteError("the coordinator ends"))
