"""What a node must have installed for a model, and which plugin of the coordinator's has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.coordinator.members import Member
from core.installing import how_to_install
from core.interfaces.checkpoint import Source
from core.plugins import LoadedPlugin, PluginHost
from core.protocol.fields import clipped
from core.protocol.messages import LeftOut


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
        return self._lacking(member, "it", "there")

    def tell(self, members: Iterable[Member]) -> None:
        """Has each member that lacks something say so to its own user, once."""
        for member in members:
            reason = self._lacking(member, "this machine", "here")
            if reason and not member.is_left_out:
                member.is_left_out = True
                member.order(LeftOut(clipped(reason)))

    def _lacking(self, member: Member, who: str, where: str) -> str:
        plugins = member.hello.plugins
        there = {added for plugin in plugins for added in plugin.adds}
        missing = [need for need in self.wanted if plugins and need not in there]
        return "; ".join(f"{who} lacks the {_what_to_do(need, self.wanted[need], member, where)}" for need in missing)


def _what_to_do(need: str, owner: LoadedPlugin, member: Member, where: str) -> str:
    has = {plugin.distribution: plugin.version for plugin in member.hello.plugins}.get(owner.distribution)
    what = f"{need} of the plugin {owner.name!r} ({f'{owner.distribution} {owner.version}'.strip()})"
    if not owner.version:
        return f"{what}: install that {where}, and start the node again"
    how = how_to_install(owner.distribution, owner.version, member.hello.installer)
    instead = f", instead of its {has}" if has and has != owner.version else ""
    return f"{what}: {how} {where}{instead}, and start the node again"
