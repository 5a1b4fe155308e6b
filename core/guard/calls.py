"""A call into a plugin, and what is said of one that goes wrong."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

from core.errors import CoreError, PluginError

MAX_SHOWN = 100
HINT = "do without it, or install another version of it"
_log = logging.getLogger(__name__)


class Call(NamedTuple):
    """Of `method` of an item that a plugin added. `item` says whose: "quantizer 'bf16'"."""

    plugin: str
    item: str
    method: str
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def raised(self, error: BaseException) -> PluginError:
        _log.debug("%s failed", self.plugin, exc_info=error)
        return self.failed(raised(error))

    def gave(self, given: str, must: str) -> PluginError:
        """Both in words: see `shown`."""
        return self.failed(f"gave {given}, and it must give {must}")

    def failed(self, what: str) -> PluginError:
        asked = ", ".join(map(shown, self.args))
        return PluginError(
            f"{self.plugin} failed",
            f"{self.method}({asked}) of its {self.item} {what}",
            HINT,
        )


Check = Callable[[Call, Any], Any]
"""Gets what a call gave, and returns it. Raises PluginError if that is not what the interface promises."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Stands before the methods of one object of a plugin's."""

    plugin: str
    item: str

    def watch(self, object_: Any, method: str, check: Check, passes: tuple[type[Exception], ...] = ()) -> None:
        """From now on what `method` gives is checked, and what it raises is the plugin's, but for CoreErrors, a lack of
        memory and what `passes`."""
        unwatched, plugin, item = as_its_class_has_it(object_, method), self.plugin, self.item

        @wraps(getattr(object_, method))
        def watched(*args: Any, **options: Any) -> Any:
            call = Call(plugin, item, method, args, options)
            try:
                given = unwatched(*args, **options)
            except (Exception, SystemExit) as error:
                if isinstance(error, passes) or is_excused(error):
                    raise
                raise call.raised(error) from error
            return check(call, given)

        vars(object_)[method] = watched


def as_its_class_has_it(object_: object, method: str) -> Callable[..., Any]:
    """The method, by what the class of `object_` has when it is called. What is the object's own stays as it is."""
    kind = type(object_)
    if method in vars(object_) or not inspect.isfunction(inspect.getattr_static(kind, method)):
        own: Callable[..., Any] = getattr(object_, method)
        return own
    return lambda *args, **options: getattr(kind, method)(object_, *args, **options)


def is_excused(error: BaseException) -> bool:
    """Whether `error` says itself what failed, or is a lack of memory, torch's own kind included."""
    return isinstance(error, CoreError | MemoryError) or type(error).__name__ == "OutOfMemoryError"


def raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error}"


def shown(value: object) -> str:
    """In a few words: a tensor by dtype and shape, what is short and plain as it is, all else by its type."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    if value is None or isinstance(value, str | int | float | range | tuple | list):
        text = f"{value}" if isinstance(value, str) and type(value) is not str else repr(value)
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return f"a {type(value).__name__}"


def must_be(kind: type | tuple[type, ...], must: str) -> Check:
    """A check of the type."""

    def check(call: Call, given: Any) -> Any:
        if not isinstance(given, kind):
            raise call.gave(shown(given), must)
        return given

    return check
