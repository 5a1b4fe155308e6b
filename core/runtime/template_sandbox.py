"""Where chat templates run: transformers' Jinja environment, with bounds on time and size.

A template comes with a model, from strangers. It may loop, call, join, add and multiply, and each of these is counted
against the bounds of the rendering that it is part of.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, ClassVar, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 10.0
"""Of processor time, for one rendering."""
MAX_CHARACTERS = 32 << 20
"""Of what is rendered, and of every text that is made on the way."""
MAX_EXPONENT = 1024

_TIME_IS_UP: ContextVar[float] = ContextVar("time is up")
"""By the processor time of the thread that renders."""


class OutOfBounds(TemplateError):
    """The template takes too long, or makes too much text."""


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops: ClassVar[frozenset[str]] = frozenset({"+", "*", "**"})  # type: ignore[misc]

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def compiled(self, source: str) -> Template:
        """Raises TemplateError for what isn't Jinja."""
        return self.from_string(_Counted().visit(self.parse(source)))

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Raises OutOfBounds, and whatever the template raises or trips over."""
        token = _TIME_IS_UP.set(time.thread_time() + MAX_SECONDS)
        try:
            return self.concat(template.root_render_func(template.new_context(dict(variables))))
        finally:
            _TIME_IS_UP.reset(token)

    def tick(self) -> None:
        if time.thread_time() > _TIME_IS_UP.get():
            raise OutOfBounds(f"it takes more than {MAX_SECONDS:.0f} s")

    def joined(self, *values: Any) -> str:
        return self.concat(map(str, values))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        if any(isinstance(value, int) and value > MAX_CHARACTERS for value in args):
            raise OutOfBounds(f"it calls a function with a number above {MAX_CHARACTERS}")
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and abs(right) > MAX_EXPONENT:
            raise OutOfBounds(f"it raises a number to the power of {right}")
        if operator == "*":
            _require_length(_length(left) * right if _length(left) else _length(right) * left)
        elif operator == "+":
            _require_length(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What compiled templates join all output with."""
        return "".join(_bounded(parts))


class _Counted(NodeTransformer):
    """Has each turn of a loop, and each text that `~` joins, go through the sandbox."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for those who train."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict`, of which a template gets no more than these."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Takes no names of Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _refuse_internal(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_internal(name)
        super().__setitem__(name, value)


def _refuse_internal(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(f"a namespace takes no {name!r}")


def _call(method: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None, lineno=line)


def _bounded(parts: Iterable[str]) -> Iterator[str]:
    length = 0
    for part in parts:
        length += len(part)
        _require_length(length)
        yield part


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _require_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise OutOfBounds(f"it makes a text of more than {MAX_CHARACTERS} characters")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes that Jinja's own makes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
