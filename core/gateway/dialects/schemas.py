"""JSON schemas as grammars take them: closed where they say nothing, and without keywords that ask for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from core.errors import RequestError

_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""Those that llguidance enforces; any other is an annotation, as JSON Schema has it."""
_DRAFTS = ("http://json-schema.org/", "https://json-schema.org/")
_INT64 = 2**63
_LOWEST = -(_INT64 - 4096)
"""Lower ones don't keep apart from the end of int64 as floats."""
_MAX_COUNT = 2**32 - 1
MAX_PARTS = 50_000
"""Of the schemas of one request, each time that one is looked at: while they are gone through all wait."""
_MAX_POINTER = 1024
"""Letters. What a longer reference points to is left to who enforces the schema."""
_ANY: tuple[Any, ...] = (True, {})
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")
_BRANCHES = ("allOf", "anyOf", "oneOf")


class PartCount:
    """How many parts the schemas of one request may still have. What is looked at several times counts each time."""

    def __init__(self) -> None:
        self._left = MAX_PARTS

    def note(self, parts: int = 1) -> None:
        """Raises RequestError for one that is too many."""
        self._left -= parts
        if self._left < 0:
            raise RequestError(
                "the JSON schemas of this request are too large",
                f"they have more than {MAX_PARTS // 3} parts, or refer to them again and again",
                "make them smaller",
                param="grammar",
            )


def enforced(schema: Mapping[str, Any], parts: PartCount | None = None) -> dict[str, Any]:
    """What a text is held to that shall fit `schema`.

    An object whose `properties` are told has no others, unless `additionalProperties` says so: else a small model goes
    on with more and more of them. Where several schemas describe one object together, it has the properties of all.
    Raises RequestError for a schema that is nested too deeply, or has more parts than are left to its request.
    """
    try:
        return _Closing(schema, parts or PartCount()).whole()
    except RecursionError as error:
        raise RequestError("a JSON schema is nested too deeply", hint="make it flatter", param="grammar") from error


def enforced_arguments(parameters: Mapping[str, Any] | None, parts: PartCount | None = None) -> dict[str, Any]:
    """What the arguments of a call are held to: an object, whatever else the schema would allow."""
    given: Mapping[str, Any] = {"properties": {}} if parameters is None else parameters
    return {**enforced(given, parts), "type": "object"}


class _Closing:
    def __init__(self, root: Mapping[str, Any], parts: PartCount) -> None:
        self._root = root
        self._parts = parts
        self._left_open: dict[str, str] = {}
        """The names of copies that something else closes, by the references to what they are copied from."""
        self._to_copy: list[tuple[str, str]] = []
        self._numbers = count()

    def whole(self) -> dict[str, Any]:
        closed: dict[str, Any] = self._schema(self._root)
        copies: dict[str, Any] = {}
        while self._to_copy:
            name, pointer = self._to_copy.pop()
            copies[name] = self._schema(self._at(pointer), closes=False)
        defined = closed.get("$defs")
        return {**closed, "$defs": {**(defined if isinstance(defined, dict) else {}), **copies}} if copies else closed

    def _schema(self, schema: Any, *, closes: bool = True) -> Any:
        """`schema` closed, or with `closes` false as a part of one that is closed elsewhere."""
        self._parts.note()
        if not isinstance(schema, Mapping):
            return schema
        kept = {key: value for key, value in schema.items() if not _asks_for_nothing(key, value, schema)}
        branches_close = closes and not _is_composed(kept)
        inside = {key: self._inside(key, value, branches_close) for key, value in kept.items()}
        return self._closed(inside, kept) if closes else inside

    def _inside(self, key: str, value: Any, branches_close: bool) -> Any:
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            return {name: self._schema(part) for name, part in value.items()}
        if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            closes = branches_close or key not in _BRANCHES
            return [self._schema(part, closes=closes) for part in value]
        if key == "$ref" and not branches_close:
            return self._reference_left_open(value)
        return self._schema(value) if key in _SCHEMAS else value

    def _closed(self, inside: dict[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
        names, is_open = self._names(kept, set())
        own = inside.get("properties", {})
        is_told = "properties" in kept or (bool(names) and _is_composed(kept))
        if is_open or not is_told or not isinstance(own, dict):
            return inside
        inside.pop("unevaluatedProperties", None)
        others = dict.fromkeys((name for name in names if name not in own), True)
        return {**inside, "properties": {**own, **others}, "additionalProperties": False}

    def _reference_left_open(self, pointer: Any) -> Any:
        if not isinstance(pointer, str) or self._at(pointer) is None:
            return pointer
        if pointer not in self._left_open:
            self._left_open[pointer] = self._free_name()
            self._to_copy.append((self._left_open[pointer], pointer))
        return f"#/$defs/{self._left_open[pointer]}"

    def _free_name(self) -> str:
        defined = self._root.get("$defs")
        taken = defined if isinstance(defined, Mapping) else {}
        return next(name for i in self._numbers if (name := f"open-{i}") not in taken)

    def _names(self, schema: Any, seen: set[str]) -> tuple[dict[str, None], bool]:
        """The properties that a schema and its branches tell, and whether one of them says that there may be more."""
        self._parts.note()
        if not isinstance(schema, Mapping):
            return {}, False
        own = schema.get("properties")
        names: dict[str, None] = dict.fromkeys(own if isinstance(own, Mapping) else ())
        self._parts.note(len(names))
        is_open = schema.get("additionalProperties", False) is not False
        for branch in self._branches(schema, seen):
            more, branch_is_open = self._names(branch, seen)
            names |= more
            is_open = is_open or branch_is_open
        return names, is_open

    def _branches(self, schema: Mapping[str, Any], seen: set[str]) -> Iterator[Any]:
        for key in _BRANCHES:
            if isinstance(branches := schema.get(key), list):
                yield from branches
        if isinstance(pointer := schema.get("$ref"), str) and pointer not in seen:
            seen.add(pointer)
            yield self._at(pointer)

    def _at(self, pointer: str) -> Any:
        """What a reference within the schema points to (RFC 6901), or None."""
        if len(pointer) > _MAX_POINTER or not f"{pointer}/".startswith("#/"):
            return None
        found: Any = self._root
        for part in pointer[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            match found:
                case Mapping():
                    found = found.get(name)
                case list() if name.isdecimal() and int(name) < len(found):
                    found = found[int(name)]
                case _:
                    return None
        return found


def _is_composed(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas tell an object's properties together."""
    parts = [key for key in ("properties", "anyOf", "oneOf", "$ref") if key in schema]
    together = schema.get("allOf")
    return len(parts) + (len(together) if isinstance(together, list) else 0) > 1


def _asks_for_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a keyword leaves everything open that its absence would."""
    match key:
        case "uniqueItems":
            return value is False
        case "propertyNames":
            return value in (*_ANY, {"type": "string"})
        case "unevaluatedProperties" | "unevaluatedItems":
            return value in _ANY
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return value in ({},)
        case "not":
            return value is False
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "format":
            return isinstance(value, str) and value not in _FORMATS
        case "$schema":
            return isinstance(value, str) and not value.startswith(_DRAFTS)
        case "minimum" | "exclusiveMinimum":
            return _is_number(value) and value <= _LOWEST
        case "maximum" | "exclusiveMaximum":
            return _is_number(value) and value >= _INT64
        case "maxLength" | "maxItems" | "maxProperties":
            return _is_number(value) and value > _MAX_COUNT
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
