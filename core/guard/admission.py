"""What a plugin's class must be, before an object of it is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import get_annotations
from typing import Any, NamedTuple

from core.errors import PluginError
from core.interfaces.architecture import Architecture
from core.interfaces.dtypes import DType
from core.interfaces.quantizer import Quantizer
from core.interfaces.transport import MIN_MESSAGE_BYTES, Transport


class _Attribute(NamedTuple):
    name: str
    is_right: Callable[[Any], bool]
    must: str


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_text, value))


_OF_ALL = (_Attribute("name", _is_text, "a string"),)
_BY_KIND: dict[type[Any], tuple[_Attribute, ...]] = {
    Quantizer: (
        _Attribute("name", lambda name: name != "auto", "another one: --quant auto is what suits the checkpoint"),
        _Attribute("packs_embeddings", lambda value: isinstance(value, bool), "True or False"),
        _Attribute("compute", lambda value: value is None or isinstance(value, DType), "a DType of core's, or None"),
        _Attribute("quality", _is_text, "a string"),
    ),
    Architecture: (_Attribute("model_types", _are_names, "a tuple of strings"),),
    Transport: (
        _Attribute("max_message", lambda value: isinstance(value, int), "a number of bytes"),
        _Attribute("max_message", lambda value: value >= MIN_MESSAGE_BYTES, f"{MIN_MESSAGE_BYTES} or more"),
    ),
}


def admitted(hook: str, cls: object, base: type[Any]) -> Any:
    """An object of the class `cls` that `hook` returned. Raises PluginError for what is no whole `base`."""
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise PluginError(f"{hook} returned {cls!r}", f"it must return subclasses of {base.__name__}")
    missing = [attribute for attribute in get_annotations(base) if not hasattr(cls, attribute)]
    if missing:
        raise PluginError(f"{cls.__name__} does not define {' and '.join(missing)}")
    item: Any = cls()
    for attribute in (*_OF_ALL, *_BY_KIND.get(base, ())):
        value = getattr(item, attribute.name)
        if not attribute.is_right(value):
            raise PluginError(f"the {attribute.name} of {cls.__name__} is {value!r}", f"it must be {attribute.must}")
    for method in (name for name, value in vars(base).items() if inspect.isfunction(value)):
        _refuse_other_arguments(item, method, base)
    return item


def _refuse_other_arguments(item: object, method: str, base: type[Any]) -> None:
    """Raises PluginError for a method that can't be called as core does."""
    of_base = list(inspect.signature(getattr(base, method)).parameters.values())[1:]
    positional = [each.name for each in of_base if each.kind is not each.KEYWORD_ONLY]
    by_name = {each.name: None for each in of_base if each.kind is each.KEYWORD_ONLY}
    named = f"{type(item).__name__}.{method}"
    try:
        inspect.signature(getattr(item, method)).bind(*positional, **by_name)
    except TypeError as error:
        wanted = ", ".join([*positional, *(f"{name}=..." for name in by_name)])
        raise PluginError(f"{named} can't be called", f"{error}: it must take ({wanted})") from error
