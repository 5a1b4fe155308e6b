"""Conversations to prompts, by the chat templates that come with a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.errors import RequestError
from core.interfaces.engine import Conversation
from core.runtime.prompt_template import PromptTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CUT = "\ufdd0"
"""Where a prompt is cut before it is encoded: a code point that is no character."""
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatPrompts:
    """`plain` is the template of conversations, `with_tools` that of those which offer tools; None if there is none.

    A model has one template for both, or several by name: "default", "tool_use".
    """

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self._inner = inner
        given: str | Mapping[str, str] | None = inner.chat_template
        named = given if isinstance(given, Mapping) else {"default": given} if given else {}
        templates = {name: PromptTemplate(named[name]) for name in ("default", "tool_use") if named.get(name)}
        self.plain: PromptTemplate | None = templates.get("default")
        self.with_tools: PromptTemplate | None = templates.get("tool_use", self.plain)
        self._behind_first = _behind_first_characters(
            token.content for token in inner.added_tokens_decoder.values() if token.special
        )

    def text(self, conversation: Conversation) -> str:
        """The prompt's text, special tokens included. Raises RequestError as `ids` does."""
        return self._rendered(conversation).replace(_CUT, "")

    def ids(self, conversation: Conversation) -> list[int]:
        """The prompt, ready for the assistant's answer. A special token that a message has is text in it.

        Raises RequestError if there is no template, or it knows nothing of the tools or of an option, or refuses the
        messages, or passes over anything that they say.
        """
        first, *more = self._rendered(conversation, completely=True).split(_CUT)
        ids = self._encode(first)
        for piece in more:
            ids += self._encode_behind(piece)
        return ids

    def _rendered(self, conversation: Conversation, *, completely: bool = False) -> str:
        """With a cut within each special token that the conversation has."""
        template = self._template(conversation)
        messages = [_in_known_role(message, template) for message in self._cut(conversation.messages)]
        variables = {
            **self._inner.special_tokens_map,
            **self._cut(conversation.template_options),
            "tools": self._cut(conversation.tools) or None,
            "documents": None,
            "add_generation_prompt": conversation.opens_answer,
        }
        prompt = template.render(messages, variables)
        if completely:
            template.refuse_dropped(messages, variables, prompt)
        return _up_to_its_end(messages[-1], prompt) if conversation.continues_last else prompt

    def _template(self, conversation: Conversation) -> PromptTemplate:
        """Raises RequestError for what it would pass over in silence, or if there is none."""
        if not conversation.messages:
            raise RequestError("the conversation is empty", hint="send at least one", param="prompt")
        template = self.with_tools if conversation.tools else self.plain
        if template is None:
            raise RequestError(
                "this model has no chat template" if self.with_tools is None else "this model needs tools to chat",
                "it continues text and takes no messages",
                "give it a text instead",
                param="prompt",
            )
        if conversation.tools and "tools" not in template.variables:
            raise RequestError("this model takes no tools", "its chat template has no place for them", param="tools")
        own = template.variables - _RESERVED - self._inner.special_tokens_map.keys()
        for option in conversation.template_options:
            if option not in own:
                raise RequestError(
                    f"this model's chat template has no option {option!r}",
                    f"it has {', '.join(sorted(own))}" if own else "it has none",
                    "leave it out",
                    param="template_options",
                )
        return template

    def _cut(self, value: Any) -> Any:
        match value:
            case str():
                return self._behind_first.sub(rf"{_CUT}\g<0>", value)
            case Mapping():
                return {key: self._cut(each) for key, each in value.items()}
            case Sequence():
                return [self._cut(each) for each in value]
            case _:
                return value

    def _encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False))

    def _encode_behind(self, text: str) -> list[int]:
        """As it is encoded in the midst of a text: sentencepiece puts a space before what begins one."""
        newline = self._encode("\n")
        ids = self._encode(f"\n{text}")
        return ids[len(newline) :] if ids[: len(newline)] == newline else self._encode(text)


def _behind_first_characters(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the rest of each of `tokens` behind its first character; the longest one counts where several begin.

    Tokens are looked for behind a first character that they share: a model has hundreds of them, and most texts none.
    """
    rests: dict[str, list[str]] = {}
    for token in sorted((token for token in tokens if len(token) > 1), key=len, reverse=True):
        rests.setdefault(token[0], []).append(re.escape(token[1:]))
    behind = [f"(?<={re.escape(first)})(?:{'|'.join(found)})" for first, found in rests.items()]
    return re.compile("|".join(behind) or "(?!)")


def _up_to_its_end(message: Mapping[str, Any], prompt: str) -> str:
    """`prompt` without what its template puts behind the text of its last message, which is to go on."""
    text = message.get("content")
    said = text.strip() if isinstance(text, str) else ""
    if not said or said not in prompt:
        raise RequestError(
            "the last message can't be continued",
            "the model's chat template does not end with its text",
            "send a text in it, or leave 'continue_final_message' out",
            param="prompt",
        )
    end = prompt.rindex(said) + len(said)
    spaces = text[len(text.rstrip()) :] if isinstance(text, str) else ""
    return prompt[: end + len(spaces)] if prompt[end:].startswith(spaces) else prompt[:end]


def _in_known_role(message: Mapping[str, Any], template: PromptTemplate) -> dict[str, Any]:
    """A developer speaks as the system to templates that know no developer."""
    if message["role"] == "developer" and "developer" not in template.roles:
        return {**message, "role": "system"}
    return dict(message)
