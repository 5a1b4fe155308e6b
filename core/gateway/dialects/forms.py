"""The forms in which models write tool calls, and which one a chat template teaches."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, replace
from enum import StrEnum

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Form:
    """`open`, a JSON object with the function's name and its arguments, and `close`.

    `separator` stands between the objects that share an `open`, which are a JSON list where `bracket`. `arguments` is
    their key for the arguments. Where `bare`, an object that begins the text is a call without any marker. A `single`
    form's templates take one call in a message, so that more can't be told to the model afterwards. With
    `named`, a call may be the function's name, this mark (or not even that) and the arguments instead; `prefers_named`
    says that it is.
    """

    open: str
    close: str = ""
    separator: str = ""
    arguments: str = "arguments"
    bracket: bool = False
    bare: bool = False
    single: bool = False
    named: str = ""
    prefers_named: bool = False
    short_ids: bool = False

    def new_id(self) -> str:
        """Mistral's templates take ids of nine letters and digits alone."""
        if self.short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


HERMES = Form("<tool_call>", "</tool_call>")
"""Nous Hermes 2 and 3, Qwen 2.5, Qwen 3."""

LLAMA = Form("<|python_tag|>", arguments="parameters", bare=True, single=True)
"""Llama 3.1 to 3.3."""

MISTRAL = Form("[TOOL_CALLS]", "]", separator=",", bracket=True, named="[ARGS]", short_ids=True)
"""Mistral with its tokenizers v3 and v7."""

MISTRAL_NAMED = replace(MISTRAL, prefers_named=True)
"""Mistral with its tokenizers v11 and v13."""


def form_of(template: str) -> Form | None:
    """The form that a chat template teaches, or None where it is one that isn't known here, or none."""
    if MISTRAL.open in template:
        return MISTRAL_NAMED if MISTRAL.named in template else MISTRAL
    if HERMES.open in template:
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if LLAMA.open in template or ("ipython" in template and '"parameters": ' in template):
        return LLAMA
    return None


class ToolFormat(StrEnum):
    """What the host may call a form."""

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """What the host says of tools: the `format` of calls, None for the one that the chat template teaches; and whether
    they are told `as_text` where the template has no place for them.
    """

    format: ToolFormat | None = None
    as_text: bool = False

    def form(self, template: str) -> Form | None:
        """The form of calls with a chat template that has a place for tools."""
        match self.format:
            case None:
                return form_of(template)
            case ToolFormat.HERMES:
                return HERMES
            case ToolFormat.LLAMA:
                return LLAMA
            case ToolFormat.MISTRAL:
                return MISTRAL_NAMED if MISTRAL.named in template else MISTRAL
