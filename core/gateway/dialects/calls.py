"""Tool calls in a model's text, read as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from core.gateway.dialects.forms import Form
from core.gateway.dialects.pieces import CallArguments, CallBegins, Content, Piece, settled, without_begun

_STRING = r'"(?:[^"\\]|\\.){0,200}"'
"""A key or a name: no longer than that, or an unfinished one would be read again with each piece of it."""
_WS = r"[ \t\r\n]*"
"""What JSON calls whitespace."""
_HEAD = re.compile(
    rf'\{{{_WS}(?:"type"{_WS}:{_WS}"function"{_WS},{_WS})?"name"{_WS}:{_WS}({_STRING}){_WS},'
    rf'{_WS}"(?:arguments|parameters)"{_WS}:{_WS}(?=\{{)',
    re.DOTALL,
)
_FIRST_KEY = re.compile(rf"\{{{_WS}(?:({_STRING})|[^ \t\r\n\"])", re.DOTALL)
_KEYS = {'"name"', '"type"', '"id"', '"arguments"', '"parameters"'}
_MAX_BEFORE_ARGUMENTS = 160
_NAMED = r"([\w.-]{{1,64}})(?:\[CALL_ID\]\w{{1,64}})?(?:{mark})?\s*(?=\{{)"


class CallReader:
    """Splits a text into content and calls of the functions `names`, the same wherever the text is cut into pieces.

    A call begins when its name is known and its arguments open; from then on they are handed out as they come, even
    where they turn out not to be JSON. What looks like a call and is none (no JSON, a function that isn't on offer)
    is content, markers included. Whitespace around calls is dropped.

    `forced` says that a grammar lets the text be nothing but calls: its first marker may be missing. With `one`,
    whatever follows the first call is ignored.
    """

    def __init__(self, form: Form, names: Iterable[str], *, one: bool = False, forced: bool = False) -> None:
        self._form = form
        self._names = frozenset(names)
        self._one = one
        self._held = ""
        self._state: Callable[[], list[Piece]] = self._outside
        mark = re.escape(form.open)
        list_begins = r"\[?\s*" if form.bracket else ""
        self._marked = re.compile(rf"\s*{mark}\s*{list_begins}")
        self._named = re.compile(_NAMED.format(mark=re.escape(form.named))) if form.named else None
        self._calls = 0
        if forced or form.bare:
            self._expect_call(re.compile(rf"\s*(?:{mark})?\s*{list_begins}"))

    @property
    def called(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while True:
            state = self._state
            pieces += state()
            if self._state == state:
                return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """What was held back, once no text follows. Of a text that was `cut`, what began as a call is left out."""
        pieces: list[Piece] = []
        if cut and self._state == self._head:
            self._held = ""
        elif cut and self._state == self._outside:
            self._held = without_begun(self._form.open, self._held)
        while self._state == self._head:
            pieces += [*self._no_call(), *self.push("")]
        if self._state == self._outside and self._held and not (self.called and self._held.isspace()):
            pieces.append(Content(self._held))
        self._held = ""
        return pieces

    def _outside(self) -> list[Piece]:
        at = self._held.find(self._form.open)
        end = len(self._held[:at].rstrip()) if at >= 0 else settled(self._held, self._form.open)
        content = self._take(end)
        if at >= 0:
            self._expect_call(self._marked)
        return [Content(content)] if content else []

    def _expect_call(self, lead: re.Pattern[str]) -> None:
        """What is held begins with `lead`, and then with a call, or else with content."""
        self._lead = lead
        self._object = _ObjectScanner()
        self._state = self._head

    def _head(self) -> list[Piece]:
        start = self._lead_end()
        text = self._held[start:]
        if not text or self._form.open.startswith(text):
            return []
        return self._object_head(text, start) if text[0] == "{" else self._named_head(text, start)

    def _lead_end(self) -> int:
        lead = self._lead.match(self._held)
        return lead.end() if lead else 0

    def _object_head(self, text: str, start: int) -> list[Piece]:
        if head := _HEAD.match(text):
            return self._begin(_loaded(head[1]), start + head.end(), self._rest_of_object)
        first = _FIRST_KEY.match(text)
        if first and first[1] not in _KEYS:
            return self._no_call()
        end = self._object.end(text)
        broken = text.find(self._form.close) if len(self._form.close) > 1 else -1
        if 0 <= broken < (len(text) if end is None else end):
            return self._no_call()
        return [] if end is None else self._whole(text[:end], start + end)

    def _named_head(self, text: str, start: int) -> list[Piece]:
        if self._named is None:
            return self._no_call()
        if head := self._named.match(text):
            return self._begin(head[1], start + head.end(), self._outside)
        return self._no_call() if "{" in text or len(text) > _MAX_BEFORE_ARGUMENTS else []

    def _whole(self, text: str, end: int) -> list[Piece]:
        """A call whose object is no fixed sequence of keys, or whose arguments are a string that holds them."""
        match _loaded(text):
            case {"name": str() as name, "arguments": given} | {"name": str() as name, "parameters": given}:
                arguments = _loaded(given) if isinstance(given, str) else given
            case {"name": str() as name}:
                arguments = {}
            case _:
                return self._no_call()
        if name not in self._names or not isinstance(arguments, dict):
            return self._no_call()
        self._take(end)
        index = self._calls
        written = CallArguments(index, json.dumps(arguments, ensure_ascii=False))
        self._end(self._after_object)
        return [self._count(name), written]

    def _begin(self, name: Any, end: int, then: Callable[[], list[Piece]]) -> list[Piece]:
        if name not in self._names:
            return self._no_call()
        self._take(end)
        self._object = _ObjectScanner()
        self._then = then
        self._state = self._arguments
        return [self._count(name)]

    def _count(self, name: str) -> CallBegins:
        self._calls += 1
        return CallBegins(self._calls - 1, self._form.new_id(), name)

    def _no_call(self) -> list[Piece]:
        """What led here is content, and so is what follows, until the next marker."""
        content = self._take(self._lead_end())
        self._state = self._outside
        return [Content(content)] if content else []

    def _arguments(self) -> list[Piece]:
        end = self._object.end_in_next(self._held)
        text = self._take(len(self._held) if end is None else end)
        if end is not None:
            self._end(self._then)
        return [CallArguments(self._calls - 1, text)] if text else []

    def _end(self, then: Callable[[], list[Piece]]) -> None:
        self._state = self._ignore if self._one else then

    def _rest_of_object(self) -> list[Piece]:
        """The object's brace, and keys before it that say nothing to us. Models forget the brace at times."""
        text = self._held.lstrip()
        if text.startswith("}") or (text.startswith(",") and "}" in text):
            self._take(self._held.index("}") + 1)
            self._state = self._after_object
        elif text and not text.startswith(","):
            self._state = self._after_object
        return []

    def _after_object(self) -> list[Piece]:
        text = self._held.lstrip()
        close, separator = self._form.close, self._form.separator
        if close and text.startswith(close):
            self._held = text.removeprefix(close)
            self._state = self._outside
        elif separator and text.startswith(separator):
            self._expect_call(re.compile(rf"\s*{re.escape(separator)}\s*"))
        elif not (close and close.startswith(text)) and not (separator and separator.startswith(text)):
            self._state = self._outside
        return []

    def _ignore(self) -> list[Piece]:
        self._held = ""
        return []

    def _take(self, end: int) -> str:
        taken, self._held = self._held[:end], self._held[end:]
        return taken


class _ObjectScanner:
    """Finds where a JSON object ends, without reading any of it twice."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._read = 0

    def end(self, text: str) -> int | None:
        """Where the object that begins `text`, which is longer each time, ends; None while it does not."""
        end = self.end_in_next(text[self._read :])
        if end is None:
            self._read = len(text)
            return None
        return self._read + end

    def end_in_next(self, text: str) -> int | None:
        """Where the object ends in the text that follows what was given before; None where it does not."""
        for i, character in enumerate(text, 1):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if not self._depth:
                    return i
        return None


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
