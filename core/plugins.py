"""The plugin host: loads entry points one by one, sorts what they add by kind and name, keeps the broken aside."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from types import ModuleType
from typing import Any, Generic, TypeVar

import pluggy

from core import hookspecs
from core.errors import CheckpointError, ConfigError, PluginError
from core.guard import admitted, guard
from core.installing import DISTRIBUTION
from core.interfaces.architecture import Architecture
from core.interfaces.checkpoint import Checkpoint, CheckpointFormat, Source
from core.interfaces.planner import Planner
from core.interfaces.quantizer import Quantizer
from core.interfaces.transport import Transport

GROUP = "core.plugins"
SWITCH, NO_OTHERS = "CORE_PLUGINS", "none"
"""The environment variable that names which plugins are loaded beside core's own: by name, with commas between, or
none. Unless it is set, all are."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin that is set aside: everything else works without it."""

    name: str
    distribution: str
    version: str
    cause: str


@dataclass(slots=True)
class LoadedPlugin:
    name: str
    distribution: str
    version: str
    adds: list[str] = field(default_factory=list)


class Registry(Generic[T]):
    """What plugins added of one kind, by name. Asking for what isn't there says what is, and what is broken."""

    def __init__(self, kind: str, missing: Callable[[], str]) -> None:
        """`missing` says which plugins are not there that may have added it, and why."""
        self.kind = kind
        self._missing = missing
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> None:
        self._items[name] = item

    def names(self) -> list[str]:
        return sorted(self._items)

    def last_first(self) -> list[T]:
        """What is asked whether it recognises something: a stranger before what comes with core."""
        return [*reversed(self._items.values())]

    def get(self, name: str) -> T:
        """Raises PluginError listing what there is, and each plugin that is not loaded with its cause."""
        if name in self._items:
            return self._items[name]
        missing = self._missing()
        near = difflib.get_close_matches(name, self._items, n=1)
        there_are = f"there are: {', '.join(self.names()) or 'none'}"
        hint = f"did you mean {near[0]!r}?" if near and not missing else there_are
        raise PluginError(f"no {self.kind} named {name!r}", missing, hint)


class PluginHost:
    """Everything that plugins add. `PluginHost.installed()` is what commands use; tests may build their own."""

    def __init__(self) -> None:
        self.loaded: list[LoadedPlugin] = []
        self.broken: list[BrokenPlugin] = []
        self.switched_off: list[LoadedPlugin] = []
        """Those that CORE_PLUGINS leaves out: what they would add is not known."""
        self._owners: dict[str, str] = {}
        self.architectures: Registry[Architecture] = Registry("architecture", self.missing)
        self.quantizers: Registry[Quantizer] = Registry("quantizer", self.missing)
        self.transports: Registry[Transport] = Registry("transport", self.missing)
        self.planners: Registry[Planner] = Registry("planner", self.missing)
        self.checkpoint_formats: Registry[CheckpointFormat] = Registry("checkpoint format", self.missing)

    @classmethod
    def installed(cls) -> PluginHost:
        """A host with every entry point of the group `core.plugins`; a broken one is quarantined, never fatal."""
        host, wanted = cls(), _wanted()
        entries = sorted(entry_points(group=GROUP), key=_built_ins_first)
        for entry in entries:
            if wanted is None or _is_built_in(entry) or entry.name in wanted:
                host.load(entry)
            else:
                host.switched_off.append(LoadedPlugin(entry.name, *_origin(entry.dist)))
        absent = (wanted or set()) - {entry.name for entry in entries}
        host.broken += [BrokenPlugin(name, "?", "?", f"{SWITCH} names it, and it is not there") for name in absent]
        return host

    def load(self, entry: EntryPoint) -> None:
        self._admit(entry.name, *_origin(entry.dist), entry.load)

    def register(self, plugin: object, name: str) -> None:
        """Adds a plugin object that is at hand, by the same door as an installed one."""
        self._admit(name, "unpackaged", "", lambda: plugin)

    def missing(self) -> str:
        """A clause on each plugin that is not loaded, for the error of someone who asks for what it may have added."""
        clauses = [f"the plugin {b.name!r} of {b.distribution} is broken: {b.cause}" for b in self.broken]
        if self.switched_off:
            names = ", ".join(repr(plugin.name) for plugin in self.switched_off)
            clauses.append(f"{SWITCH} leaves out the plugins {names}")
        return "; ".join(clauses)

    def _admit(self, name: str, distribution: str, version: str, load: Callable[[], object]) -> None:
        try:
            plugin = load()
            _refuse_other_api(plugin)
            found = _contributions(name, plugin)
            self._add_all(f"the plugin {name!r} of {distribution} {version}".strip(), found)
        # A stranger's code may raise anything, SystemExit at import included: that is what quarantine is for.
        except (Exception, SystemExit) as error:
            self.broken.append(BrokenPlugin(name, distribution, version, f"{type(error).__name__}: {error}"))
            return
        adds = [f"{kind} {item.name}" for kind, items in found.items() for item in items]
        self.loaded.append(LoadedPlugin(name, distribution, version, adds))

    def _add_all(self, owner: str, found: Mapping[str, list[Any]]) -> None:
        """All of it or nothing: a claim that is taken already is refused before anything is added."""
        owners = dict(self._owners)
        for claim in (claim for kind, items in found.items() for item in items for claim in _claims(kind, item)):
            if owners.get(claim) == owner:
                raise PluginError(f"it adds the {claim} twice")
            if claim in owners:
                both = f"{owners[claim]} and {owner}"
                raise PluginError(f"two plugins claim the {claim}", both, "uninstall one of the two")
            owners[claim] = owner
        self._owners = owners
        registries = self._by_kind()
        for kind, items in found.items():
            for item in items:
                guard(item, owner)
                registries[kind].add(item.name, item)

    def _by_kind(self) -> dict[str, Registry[Any]]:
        registries: list[Registry[Any]] = [
            self.architectures,
            self.quantizers,
            self.transports,
            self.planners,
            self.checkpoint_formats,
        ]
        return {registry.kind: registry for registry in registries}

    def architecture_of(self, config: Mapping[str, Any]) -> Architecture:
        """The family that names `config`'s model_type, or else one that recognises the config.

        Raises ConfigError saying which there are.
        """
        wanted, architectures = config.get("model_type"), self.architectures.last_first()
        for architecture in architectures:
            if wanted in architecture.model_types:
                return architecture
        for architecture in architectures:
            if architecture.recognises(config):
                return architecture
        known = sorted(kind for a in architectures for kind in a.model_types)
        known += [f"what {a.name} recognises" for a in architectures if not a.model_types]
        raise ConfigError(
            f"no architecture reads model_type {wanted!r}",
            self.missing(),
            f"supported: {', '.join(known)}; a plugin can add more",
        )

    def format_of(self, source: Source) -> CheckpointFormat | None:
        """The one that recognises `source`, strangers first."""
        formats = self.checkpoint_formats.last_first()
        return next((each for each in formats if each.recognises(source)), None)

    def open_checkpoint(self, source: Source) -> Checkpoint:
        """Opens `source` by a format that recognises it, strangers first. Raises CheckpointError, or ConfigError for a
        revision of what has none."""
        if source.revision is not None and source.path is not None:
            raise ConfigError(
                f"there is no revision {source.revision!r} of {source.model}",
                "it is on this machine, and only repos of a hub have revisions",
                "leave it out",
            )
        if source.path is None and (named := _as_repo(source.model)):
            raise CheckpointError(
                f"{source.model} is an address", "models of the hub go by their names", f"give {named}"
            )
        if (checkpoint_format := self.format_of(source)) is not None:
            return checkpoint_format.open(source)
        if source.path is None and _looks_like_a_path(source.model):
            raise CheckpointError(
                f"there is no file or directory {source.model}",
                self.missing(),
                "check the path, or give a Hugging Face repo id",
            )
        raise CheckpointError(
            f"{source.model!r} is no model that can be read here",
            self.missing(),
            "give a directory, a file or a Hugging Face repo id, which is OWNER/NAME as in Qwen/Qwen2.5-1.5B-Instruct"
            " (names of Ollama's are none); "
            f"formats: {', '.join(self.checkpoint_formats.names())}",
        )


_PAGE = re.compile(
    r"(?:https?://[^/]+|hf\.co|huggingface\.co)/(?P<repo>[\w.-]+/[\w.-]+)(?::[\w.-]+)?"
    r"(?:/(?:tree|blob|resolve|raw)/(?P<revision>[^/?#]+)(?:/(?P<file>[^?#]*))?)?/?(?:[?#].*)?"
)
"""An address, as browsers and other programs have it."""

_HOOKS: dict[str, tuple[str, type[Any]]] = {
    "core_architectures": ("architecture", Architecture),
    "core_quantizers": ("quantizer", Quantizer),
    "core_transports": ("transport", Transport),
    "core_planners": ("planner", Planner),
    "core_checkpoint_formats": ("checkpoint format", CheckpointFormat),
}


def _as_repo(model: str) -> str:
    """The options for what the address of a page on the hub leads to; "" for what is no such address."""
    page = _PAGE.fullmatch(model)
    if page is None:
        return ""
    file, revision = page["file"] or "", page["revision"] or "main"
    named = f"{page['repo']}/{file}" if file.endswith(".gguf") else page["repo"]
    return f"--model {named}" + (f" --revision {revision}" if revision != "main" else "")


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or "\\" in model or model.endswith(".gguf")


def _wanted() -> set[str] | None:
    """The plugins to load beside core's own; None for all."""
    names = {name.strip() for name in os.environ.get(SWITCH, "").split(",")} - {""}
    return names - {NO_OTHERS} if names else None


def _is_built_in(entry: EntryPoint) -> bool:
    name, _ = _origin(entry.dist)
    return name == DISTRIBUTION


def _built_ins_first(entry: EntryPoint) -> tuple[bool, str]:
    return (not _is_built_in(entry), entry.name)


@lru_cache(maxsize=64)
def _origin(distribution: Distribution | None) -> tuple[str, str]:
    """Name and version, which are parsed from the distribution's metadata each time they are asked for."""
    return ("?", "?") if distribution is None else (distribution.name, distribution.version)


def _refuse_other_api(plugin: object) -> None:
    """Raises PluginError for a plugin that was made for other versions of the seams."""
    made_for = getattr(plugin, "CORE_API_VERSION", 1)
    versions = made_for if isinstance(made_for, tuple) else (made_for,)
    if not all(type(version) is int for version in versions):
        raise PluginError(f"its CORE_API_VERSION is {made_for!r}", "it must be a whole number, or a tuple of them")
    if hookspecs.API_VERSION not in versions:
        theirs = " and ".join(map(str, versions))
        raise PluginError(
            f"it was made for API version {theirs}, and this core has {hookspecs.API_VERSION}",
            hint="install a version of it that fits, or the core that it was made for",
        )


def _claims(kind: str, item: Any) -> list[str]:
    return [f"{kind} {item.name!r}", *(f"model_type {name!r}" for name in getattr(item, "model_types", ()))]


def _contributions(name: str, plugin: object) -> dict[str, list[Any]]:
    """Calls each hook of one plugin by itself, so that what it adds, and what fails, has an owner."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=name)
    manager.check_pending()
    _refuse_misspelt(plugin)
    found: dict[str, list[Any]] = {}
    for hook, (kind, base) in _HOOKS.items():
        caller = getattr(manager.hook, hook)
        if caller.get_hookimpls():
            found[kind] = [admitted(hook, cls, base) for cls in _returned(hook, caller())]
    if not found:
        raise PluginError("it implements no hook", hint=f"the hooks are {', '.join(_HOOKS)}")
    return found


def _refuse_misspelt(plugin: object) -> None:
    """pluggy ignores an undecorated function: one that is named like a hook is a forgotten `@hookimpl`."""
    names = vars(plugin) if isinstance(plugin, ModuleType) else dir(plugin)
    for attribute in names:
        if attribute in _HOOKS and not hasattr(getattr(plugin, attribute), f"{hookspecs.PROJECT}_impl"):
            raise PluginError(f"{attribute} lacks the @hookimpl decorator")


def _returned(hook: str, results: list[Any]) -> list[Any]:
    """What the one implementation of `hook` returned; pluggy leaves out a None."""
    classes = results[0] if results else None
    if not isinstance(classes, list | tuple):
        raise PluginError(f"{hook} returned {classes!r}", "it must return a list of classes")
    return list(classes)
