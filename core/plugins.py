"""The plugin host: loads entry points one by one, sorts what they add by kind and name, keeps the broken aside."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from inspect import get_annotations
from types import ModuleType
from typing import Any, Generic, TypeVar

import pluggy

from core import hookspecs
from core.errors import CheckpointError, ConfigError, PluginError
from core.interfaces.architecture import Architecture
from core.interfaces.checkpoint import Checkpoint, CheckpointFormat, Source
from core.interfaces.planner import Planner
from core.interfaces.quantizer import Quantizer
from core.interfaces.transport import MIN_MESSAGE_BYTES, Transport

GROUP = "core.plugins"
DISTRIBUTION = "core-cluster"
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

    def __init__(self, kind: str, broken: list[BrokenPlugin]) -> None:
        self.kind = kind
        self._broken = broken
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> None:
        self._items[name] = item

    def names(self) -> list[str]:
        return sorted(self._items)

    def last_first(self) -> list[T]:
        """What is asked whether it recognises something: a stranger before what comes with core."""
        return [*reversed(self._items.values())]

    def get(self, name: str) -> T:
        """Raises PluginError listing what there is, and each broken plugin with its cause."""
        if name in self._items:
            return self._items[name]
        near = difflib.get_close_matches(name, self._items, n=1)
        there_are = f"there are: {', '.join(self.names()) or 'none'}"
        hint = f"did you mean {near[0]!r}?" if near and not self._broken else there_are
        raise PluginError(f"no {self.kind} named {name!r}", broken_causes(self._broken), hint)


def broken_causes(broken: Iterable[BrokenPlugin]) -> str:
    """One clause on each broken plugin, for the error of someone who asks for what it may have added."""
    return "; ".join(f"the plugin {b.name!r} of {b.distribution} is broken: {b.cause}" for b in broken)


class PluginHost:
    """Everything that plugins add. `PluginHost.installed()` is what commands use; tests may build their own."""

    def __init__(self) -> None:
        self.loaded: list[LoadedPlugin] = []
        self.broken: list[BrokenPlugin] = []
        self._owners: dict[str, str] = {}
        self.architectures: Registry[Architecture] = Registry("architecture", self.broken)
        self.quantizers: Registry[Quantizer] = Registry("quantizer", self.broken)
        self.transports: Registry[Transport] = Registry("transport", self.broken)
        self.planners: Registry[Planner] = Registry("planner", self.broken)
        self.checkpoint_formats: Registry[CheckpointFormat] = Registry("checkpoint format", self.broken)

    @classmethod
    def installed(cls) -> PluginHost:
        """A host with every entry point of the group `core.plugins`; a broken one is quarantined, never fatal."""
        host = cls()
        for entry in sorted(entry_points(group=GROUP), key=_built_ins_first):
            host.load(entry)
        return host

    def load(self, entry: EntryPoint) -> None:
        self._admit(entry.name, *_origin(entry.dist), entry.load)

    def register(self, plugin: object, name: str) -> None:
        """Adds a plugin object that is at hand, by the same door as an installed one."""
        self._admit(name, "unpackaged", "", lambda: plugin)

    def _admit(self, name: str, distribution: str, version: str, load: Callable[[], object]) -> None:
        try:
            found = _contributions(name, load())
            self._add_all(f"the plugin {name!r} of {distribution}", found)
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
            if _recognises(architecture, config):
                return architecture
        known = sorted(kind for a in architectures for kind in a.model_types)
        known += [f"what {a.name} recognises" for a in architectures if not a.model_types]
        raise ConfigError(
            f"no architecture reads model_type {wanted!r}",
            broken_causes(self.broken),
            f"supported: {', '.join(known)}; a plugin can add more",
        )

    def format_of(self, source: Source) -> CheckpointFormat | None:
        """The one that recognises `source`, strangers first."""
        formats = self.checkpoint_formats.last_first()
        return next((each for each in formats if _recognises(each, source)), None)

    def open_checkpoint(self, source: Source) -> Checkpoint:
        """Opens `source` by a format that recognises it, strangers first. Raises CheckpointError, or ConfigError for a
        revision of what has none."""
        if source.revision is not None and source.path is not None:
            raise ConfigError(
                f"there is no revision {source.revision!r} of {source.model}",
                "it is on this machine, and only repos of a hub have revisions",
                "leave it out",
            )
        if (checkpoint_format := self.format_of(source)) is not None:
            return checkpoint_format.open(source)
        if source.path is None and _looks_like_a_path(source.model):
            raise CheckpointError(
                f"there is no file or directory {source.model}",
                broken_causes(self.broken),
                "check the path, or give a Hugging Face repo id",
            )
        raise CheckpointError(
            f"{source.model!r} is no model that can be read here",
            broken_causes(self.broken),
            "give a directory, a file or a Hugging Face repo id; "
            f"formats: {', '.join(self.checkpoint_formats.names())}",
        )


_HOOKS: dict[str, tuple[str, type[Any]]] = {
    "core_architectures": ("architecture", Architecture),
    "core_quantizers": ("quantizer", Quantizer),
    "core_transports": ("transport", Transport),
    "core_planners": ("planner", Planner),
    "core_checkpoint_formats": ("checkpoint format", CheckpointFormat),
}


def _recognises(item: Any, subject: object) -> bool:
    try:
        return bool(item.recognises(subject))
    except Exception as error:
        raise PluginError(
            f"the plugin that adds {item.name!r} failed",
            f"asked whether it recognises the model, it raised {type(error).__name__}: {error}",
            "uninstall it, or install another version of it",
        ) from error


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or "\\" in model or model.endswith(".gguf")


def _built_ins_first(entry: EntryPoint) -> tuple[bool, str]:
    name, _ = _origin(entry.dist)
    return (name != DISTRIBUTION, entry.name)


@lru_cache(maxsize=64)
def _origin(distribution: Distribution | None) -> tuple[str, str]:
    """Name and version, which are parsed from the distribution's metadata each time they are asked for."""
    return ("?", "?") if distribution is None else (distribution.name, distribution.version)


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
            found[kind] = [_instance(hook, cls, base) for cls in _returned(hook, caller())]
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


def _instance(hook: str, cls: object, base: type[Any]) -> Any:
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise PluginError(f"{hook} returned {cls!r}", f"it must return subclasses of {base.__name__}")
    missing = [attribute for attribute in get_annotations(base) if not hasattr(cls, attribute)]
    if missing:
        raise PluginError(f"{cls.__name__} does not define {' and '.join(missing)}")
    item: Any = cls()
    if not isinstance(item.name, str):
        raise _wrong(item, "name", "a string")
    if isinstance(item, Quantizer) and item.name == "auto":
        raise _wrong(item, "name", "another one: --quant auto is what suits the checkpoint")
    if isinstance(item, Architecture) and not _are_names(item.model_types):
        raise _wrong(item, "model_types", "a tuple of strings")
    if isinstance(item, Transport) and item.max_message < MIN_MESSAGE_BYTES:
        raise _wrong(item, "max_message", f"{MIN_MESSAGE_BYTES} or more")
    return item


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


def _wrong(item: object, attribute: str, must: str) -> PluginError:
    value = getattr(item, attribute)
    return PluginError(f"the {attribute} of {type(item).__name__} is {value!r}", f"it must be {must}")
