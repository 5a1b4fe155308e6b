"""A model's chat template: what it knows, what it makes of a conversation, and what of that it passes over."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.meta import find_undeclared_variables

from core.errors import RequestError
from core.interfaces.engine import ChatTemplate
from core.runtime.template_sandbox import OutOfBounds, Sandbox

ROLES = ("system", "developer", "user", "assistant", "tool")
_TRIPS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""A template is a program of the model's makers: it raises for wrong roles, and trips over other contents."""

Message = Mapping[str, Any]


class PromptTemplate:
    """One template. A source that isn't Jinja knows nothing, and is refused when it is rendered."""

    def __init__(self, source: str) -> None:
        self.source = source
        sandbox = _sandbox()
        try:
            tree = sandbox.parse(source)
        except TemplateError:
            tree = sandbox.parse("")
        literals = frozenset(_literals(tree))
        self.roles = tuple(role for role in ROLES if role in literals)
        """Those that it tells apart; none if it treats all alike."""
        # This folds the literals.
        self.variables = frozenset(find_undeclared_variables(tree)).difference(sandbox.globals)
        """What it looks at of what it is given."""

    def facts(self) -> ChatTemplate:
        return ChatTemplate(self.source, self.variables)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The prompt. Raises RequestError for messages that the template refuses, and if it takes too long."""
        try:
            # gpt-oss's reads the thoughts by another name than all others.
            told = [{"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m for m in messages]
            return _sandbox().render(self._compiled, {**variables, "messages": told})
        except OutOfBounds as error:
            raise RequestError(
                "the model's chat template doesn't end", str(error), "shorten the messages", param="prompt"
            ) from error
        except (TemplateError, *_TRIPS) as error:
            raise RequestError(
                "the model's chat template refuses these messages", str(error), "change the messages", param="prompt"
            ) from error

    def refuse_dropped(self, messages: Sequence[Message], variables: Mapping[str, Any], prompt: str) -> None:
        """Raises RequestError if something that `messages` say isn't in `prompt`, which was rendered of them.

        They are rendered once more with a mark in each text and each call. A mark that doesn't come out is of what is
        passed over, however the template words the rest. A template that refuses the marks is asked for the texts.
        """
        marks = _Marks()
        marked = [marks.mark(index, message) for index, message in enumerate(messages)]
        try:
            prompt = self.render(marked, variables)
        except RequestError:
            missing = [said for said in marks.said.values() if not _is_in(said.text, prompt)]
        else:
            came_out = marks.found_in(prompt)
            missing = [said for mark, said in marks.said.items() if mark not in came_out]
        if missing:
            raise self._dropped(messages[missing[0].message], missing[0])

    def _dropped(self, message: Message, said: _Said) -> RequestError:
        knows = f"it knows the roles {', '.join(self.roles)}" if self.roles else "it treats all roles alike"
        begin = said.text if len(said.text) <= 60 else f"{said.text[:57]}..."
        return RequestError(
            f"the model's chat template passes over {said.what} of message {said.message + 1}",
            f"its role is {message['role']!r} and it says {begin!r}; {knows}",
            "leave that out, or say it in a message that the template takes",
            param="prompt",
        )

    @cached_property
    def _compiled(self) -> Template:
        return _sandbox().compiled(self.source)


@dataclass(frozen=True, slots=True)
class _Said:
    """What message number `message` says: `what` it is, and its `text`."""

    message: int
    what: str
    text: str


class _Marks:
    """Marks what messages say; `said` is what each mark stands for."""

    def __init__(self) -> None:
        self.said: dict[str, _Said] = {}
        self._stem = secrets.token_hex(6)

    def mark(self, index: int, message: Message) -> Message:
        marked = dict(message)
        text = str(message.get("content") or "")
        # Templates take an assistant's earlier thoughts away, as the model was trained.
        start = text.rfind("</think>") + len("</think>") if message["role"] == "assistant" and "</think>" in text else 0
        if text[start:].strip():
            marked["content"] = text[:start] + self._marked(text[start:], index, "the text")
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(index, call) for call in message["tool_calls"]]
        return marked

    def _call(self, index: int, call: Message) -> Message:
        function = dict(call["function"])
        function["name"] += self._new(index, "a call", function["name"])
        given = function["arguments"]
        if isinstance(given, Mapping):
            mark = self._new(index, "a call's arguments", str(given))
            function["arguments"] = {**given, mark: mark}
        else:
            function["arguments"] = self._marked(given, index, "a call's arguments")
        return {**call, "function": function}

    def _marked(self, text: str, index: int, what: str) -> str:
        """In the middle: templates look at how a text begins and ends."""
        said = text.strip()
        middle = text.index(said) + len(said) // 2
        return text[:middle] + self._new(index, what, said) + text[middle:]

    def found_in(self, prompt: str) -> set[str]:
        """In one pass: a conversation may have many."""
        return set(re.findall(rf"{self._stem}[0-9a-f]{{8}}", prompt))

    def _new(self, index: int, what: str, text: str) -> str:
        mark = f"{self._stem}{len(self.said):08x}"
        self.said[mark] = _Said(index, what, text)
        return mark


@cache
def _sandbox() -> Sandbox:
    return Sandbox()


def _is_in(text: str, prompt: str) -> bool:
    """Whether each word of `text` is there: what isn't a letter or digit may be written otherwise, in JSON for one.

    Words are looked for behind the one before, which is where they are: long texts take no longer for it.
    """
    at = 0
    for word in re.finditer(r"\w+", text):
        found = prompt.find(word[0], at)
        if found >= 0:
            at = found
        elif word[0] not in prompt:
            return False
    return True


def _literals(tree: nodes.Template) -> Iterator[str]:
    """The strings that its code compares with, or looks up; not those that it writes."""
    for node in tree.find_all((nodes.Compare, nodes.List, nodes.Tuple, nodes.Dict, nodes.Test)):
        for const in node.find_all(nodes.Const):
            if isinstance(const.value, str):
                yield const.value
