"""Plugins for a test: those that are installed, and one that need not be."""

from __future__ import annotations

from core.plugins import PluginHost

__all__ = ["PluginHost", "host_with"]


def host_with(plugin: object, name: str = "tested") -> PluginHost:
    """All that is installed, and `plugin`, a module or another object that has hooks. Raises AssertionError if that is
    broken."""
    host = PluginHost.installed()
    host.register(plugin, name)
    causes = [broken.cause for broken in host.broken if broken.name == name]
    assert not causes, causes[0]
    return host
