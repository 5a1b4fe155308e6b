"""A node of core.node as the app runs it. Imported late, in a thread, for it brings torch."""

from __future__ import annotations

from collections.abc import Callable

from core.node.agent import run_node
from core.node.settings import NodeSettings
from core.node.state import Activity, Duty
from core.plugins import PluginHost


class RunningNode:
    """`run` it. `changed` hears of what `activity` says; `duty` pauses it, and has it leave."""

    def __init__(self, settings: NodeSettings, plugins: PluginHost, changed: Callable[[], None]) -> None:
        self.activity = Activity(on_change=lambda _: changed())
        self.duty = Duty()
        self._settings = settings
        self._plugins = plugins

    async def run(self) -> None:
        """Until it has left. Raises CoreError where it can't be what it was asked to be."""
        await run_node(self._settings, self._plugins, self.activity, self.duty)
