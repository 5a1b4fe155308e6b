"""The coordinator's front: the engine that the gateway is given. It answers before torch is even imported."""

from __future__ import annotations

import importlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING

import trio

from core.coordinator.changes import Changes
from core.coordinator.journal import POINT_SECONDS
from core.coordinator.settings import CoordinatorSettings
from core.errors import NotReady, sole_error
from core.interfaces.engine import ClusterStatus, Conversation, Generation, GenerationRequest, ModelCard, WhatIf
from core.interfaces.telemetry import History, Metric, PaceStatus, SessionStatus
from core.plugins import PluginHost

if TYPE_CHECKING:
    from core.coordinator.generator import Generator
    from core.coordinator.live import Live
    from core.coordinator.membership import HostsRegister


PROMPT_END = 256
"""Characters that say whether a prompt has opened the model's thoughts."""


class Coordinator:
    """The Engine of core.interfaces.engine; `run` brings it to life. `node_port` is set once nodes can join.

    `plugins` None: those that are installed.
    """

    def __init__(self, settings: CoordinatorSettings, plugins: PluginHost | None = None) -> None:
        self.served_model = settings.served_model_name
        self.created = int(time.time())
        self.node_port = 0
        self._settings = settings
        self._plugins = plugins
        self.changes = Changes()
        """Of `status().state` and `detail`; how far a load is changes more often."""
        self._phase = "starting"
        self._progress: tuple[int, int] | None = None
        self._live: Live | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; reports when nodes can join.

        Raises ConfigError, CheckpointError or PluginError for a model or an option that can't be had.
        """
        self._trio = trio.lowlevel.current_trio_token()
        plugins = self._plugins or await trio.to_thread.run_sync(PluginHost.installed)
        live_module = await trio.to_thread.run_sync(importlib.import_module, "core.coordinator.live")
        live: Live = await trio.to_thread.run_sync(
            live_module.Live, self._settings, plugins, self._note, self.changes.notify
        )
        try:
            async with live.node_port.open() as self.node_port:
                task_status.started()
                self._live = live
                await live.run()
        except BaseExceptionGroup as group:
            raise sole_error(group) from None
        finally:
            self._live = None

    def status(self) -> ClusterStatus:
        if self._live is not None:
            from core.coordinator.view import cluster_status

            return cluster_status(self._live, self._phase, self._progress)
        return ClusterStatus(
            model=self.served_model,
            state="waiting",
            detail=self._phase,
            progress=self._progress,
            required_nodes=self._settings.min_nodes,
            ready_nodes=0,
            route_epoch=0,
            layers=0,
            sessions=0,
            tokens_per_second=0.0,
            quant=self._settings.quant,
            dtype=self._settings.dtype or "auto",
            wire_dtype=self._settings.wire_dtype,
            quality="",
            nodes=(),
            left_out={},
        )

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Generation]:
        return self._generate(request)

    @asynccontextmanager
    async def _generate(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        async with self._open().generate(request) as session:
            yield session

    def watch(self) -> AbstractAsyncContextManager[AsyncIterator[SessionStatus | PaceStatus]]:
        self._open()
        assert self._live is not None
        return self._live.telemetry.watch()

    def metrics(self) -> tuple[Metric, ...]:
        if self._live is None:
            return ()
        from core.coordinator.view import metrics

        return tuple(metrics(self._live))

    @cached_property
    def membership(self) -> HostsRegister:
        from core.coordinator.membership import HostsRegister

        return HostsRegister(self._settings, self._tokens_by_node)

    def history(self) -> History:
        return self._live.journal.history() if self._live is not None else History(POINT_SECONDS, ())

    async def what_if(self, without: Sequence[str], newcomers: Sequence[int]) -> WhatIf:
        self._open()
        assert self._live is not None and self._live.supervisor is not None
        from core.coordinator.what_if import what_if

        planning = self._live.supervisor.planning
        return await what_if(planning, planning.asked_for(self._live.members.available()), without, newcomers)

    def _tokens_by_node(self) -> Mapping[str, int]:
        return self._live.telemetry.tokens_by_node if self._live is not None else {}

    async def rebalance(self) -> str:
        self._open()
        assert self._live is not None and self._live.supervisor is not None
        return self._live.supervisor.rebalance()

    def card(self) -> ModelCard:
        generator = self._open()
        prompts = generator.tokenizer.chat_prompts
        return ModelCard(
            self.served_model,
            self.created,
            generator.context_length,
            generator.model.spec.vocab_size,
            prompts.plain.facts() if prompts.plain else None,
            prompts.with_tools.facts() if prompts.with_tools else None,
        )

    async def tokenize(self, prompt: str | Conversation, client: str = "") -> tuple[int, ...]:
        generator = self._open()
        return tuple(await generator.preparation.run(client, generator.encode, prompt))

    async def prompt_end(self, conversation: Conversation, client: str = "") -> str:
        generator = self._open()
        text = await generator.preparation.run(client, generator.tokenizer.chat_prompts.text, conversation)
        return text[-PROMPT_END:]

    async def detokenize(self, tokens: tuple[int, ...], client: str = "") -> str:
        generator = self._open()
        generator.require_known(tokens, "tokens")
        return await generator.preparation.run(client, generator.tokenizer.decode_whole, tokens)

    def _open(self) -> Generator:
        """Raises NotReady while the model is being opened."""
        if self._live is not None and self._live.generator is not None:
            return self._live.generator
        status = self.status()
        raise NotReady(
            "the model is not ready", status.detail, required=status.required_nodes, ready=status.ready_nodes
        )

    def _note(self, phase: str, progress: tuple[int, int] | None = None) -> None:
        """May be called from any thread."""
        self._phase, self._progress = phase, progress
        with suppress(trio.RunFinishedError):
            self._trio.run_sync_soon(self.changes.notify, idempotent=True)
