"""From a request's JSON to a body: what may be left idle, and errors that name the field."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from core.errors import RequestError

Idle: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Fields of the API that are not supported, with the values of each that ask for nothing."""


class Fields(Struct, kw_only=True, forbid_unknown_fields=True):
    """A body's fields; `idle` are those it lacks, `idle_inside` those that the objects in a field lack.

    `instead` says of such and of unknown fields what to use.
    """

    idle: ClassVar[Idle] = {}
    idle_inside: ClassVar[Mapping[str, Idle]] = {}
    instead: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def spelled_out(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields without abbreviations that the API allows."""
        return fields


_NOTHING: Mapping[str, str] = {}
_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_BE, codecs.BOM_UTF16_LE)
_VALUE = "invalid_value"

F = TypeVar("F", bound=Fields)


def decode(body: bytes, kind: type[F]) -> F:
    """A request's JSON as `kind`. Raises RequestError naming the field that is wrong, unknown or not supported."""
    if body.startswith(_BYTE_ORDER_MARKS):
        raise RequestError(
            "the body begins with a byte order mark (BOM)",
            "JSON has none",
            "send UTF-8 without it",
            code="invalid_json",
        )
    try:
        fields = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise RequestError("the body is not valid JSON", str(error), code="invalid_json") from error
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    try:
        return msgspec.convert(_without_idle(kind.spelled_out(fields), kind), kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _naming_the_field(error, kind.instead) from error


def _without_idle(fields: dict[str, Any], kind: type[Fields]) -> dict[str, Any]:
    kept: dict[str, Any] = _drop(fields, kind.idle, "", kind.instead)
    for name in kind.idle_inside.keys() & kept.keys():
        idle = kind.idle_inside[name]
        match kept[name]:
            case [*items]:
                kept[name] = [_drop(item, idle, f"{name}[{i}].") for i, item in enumerate(items)]
            case item:
                kept[name] = _drop(item, idle, f"{name}.")
    return kept


def _drop(fields: Any, idle: Idle, where: str, instead: Mapping[str, str] = _NOTHING) -> Any:
    """`fields` without nulls and without what is idle; anything but an object is left to be refused as such."""
    if not isinstance(fields, dict):
        return fields
    kept = {name: value for name, value in fields.items() if value is not None}
    for name in idle.keys() & kept.keys():
        if not any(_same(kept[name], nothing) for nothing in idle[name]):
            raise RequestError(
                f"'{where}{name}' is not supported",
                hint=instead.get(name, f"leave it out, or send {idle_values(idle[name])}"),
                param=where + name,
                code="unsupported_parameter",
            )
        del kept[name]
    return kept


def idle_values(values: tuple[Any, ...]) -> str:
    """What a field may be that is not supported, in words."""
    return " or ".join(["null", *(msgspec.json.encode(each).decode() for each in values)])


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


_MAX_SAID = 2000
_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*?)(?:\[\.\.\.\])?`)?", re.DOTALL)
_PART = re.compile(r"(?:content|output)\[\d+\]\.type$")
_FIELD = re.compile(r"Object (?P<how>contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL)


def _naming_the_field(error: msgspec.ValidationError, instead: Mapping[str, str]) -> RequestError:
    """msgspec says where in the text of its errors alone: `... - at `$.messages[0].role``."""
    said = str(error)
    # A message may quote a name as long as the body, made so that the search for a place in it takes for ever.
    place = _PLACE.fullmatch(said) if len(said) <= _MAX_SAID else None
    what, path = (place["what"], place["path"] or "") if place else (said[:_MAX_SAID], "")
    if field := _FIELD.fullmatch(what):
        param = f"{path}.{field['name']}".lstrip(".")
        if field["how"] == "missing required":
            return RequestError(f"'{param}' is missing", param=param, code="missing_required_parameter")
        if param in instead:
            return RequestError(
                f"'{param}' is not supported", hint=instead[param], param=param, code="unsupported_parameter"
            )
        return RequestError(f"'{param}' is not a known field", param=param, code="unknown_parameter")
    if _PART.search(path):
        return RequestError(
            f"'{path}' is not supported", what, "only text is read here: leave the part out", param=path, code=_VALUE
        )
    return RequestError(f"'{path}' is not valid", what, param=path, code=_VALUE)
