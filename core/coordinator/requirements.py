"""What a node must have installed for a model, and which plugin of the coordinator's has it."""

from __future__ import annotations

from dataclasses import dataclass

from core.coordinator.members import Member
from core.interfaces.checkpoint import Source
from core.plugins import LoadedPlugin, PluginHost


@dataclass(frozen=True, slots=True)
class Requirements:
    """`wanted`: by what is needed ("architecture llama"), the plugin that adds it here."""

    wanted: dict[str, LoadedPlugin]

    @classmethod
    def of(cls, plugins: PluginHost, source: Source, architecture: str, quant: str) -> Requirements:
        needed = [f"architecture {architecture}", f"quantizer {quant}"]
        if (checkpoint_format := plugins.format_of(source)) is not None:
            needed.append(f"checkpoint format {checkpoint_format.name}")
        owners = {added: plugin for plugin in plugins.loaded for added in plugin.adds}
        return cls({need: owners[need] for need in needed if need in owners})

    def lacking(self, member: Member) -> str:
        """What the member has no plugin for, and how to add it, in a sentence; empty if it has all, or says nothing."""
        plugins = member.hello.plugins
        there = {added for plugin in plugins for added in plugin.adds}
        missing = [need for need in self.wanted if plugins and need not in there]
        return "; ".join(_sentence(need, self.wanted[need], member) for need in missing)


def _sentence(need: str, owner: LoadedPlugin, member: Member) -> str:
    has = {plugin.distribution: plugin.version for plugin in member.hello.plugins}.get(owner.distribution)
    name = f"{owner.distribution} {owner.version}".strip()
    what = f"it lacks the {need} of the plugin {owner.name!r} ({name})"
    if not owner.version:
        return f"{what}: install that there, and start the node again"
    instead = f", instead of its {has}" if has and has != owner.version else ""
    return f"{what}: run `pip install {owner.distribution}=={owner.version}` there{instead}, and start the node again"
