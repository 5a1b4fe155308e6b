"""`/tokenize` and `/detokenize`, in vLLM's shapes (docs.vllm.ai, online serving)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, field

from core.errors import RequestError
from core.gateway.schemas.chat import ChatBody
from core.gateway.schemas.common import TokenId, require_short
from core.gateway.schemas.decoding import Fields, Idle
from core.gateway.schemas.messages import Messages, conversation
from core.gateway.schemas.tools import MAX_FUNCTIONS, FunctionTool
from core.interfaces.engine import Conversation


class TokenizeBody(Fields, kw_only=True):
    """Either `prompt`, or `messages` as the model's chat template renders them."""

    idle: ClassVar[Idle] = {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "return_token_strs": (False,),
    }
    idle_inside: ClassVar[Mapping[str, Idle]] = {"messages": ChatBody.idle_inside["messages"]}

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_FUNCTIONS)] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None

    @property
    def names(self) -> dict[str, str]:
        """The endpoint's own names of an engine's fields, where they differ: see `naming_fields`."""
        return {} if self.messages is None else {"prompt": "messages", "template_options": "chat_template_kwargs"}

    def text(self) -> str | Conversation:
        """What is to be tokenized. Raises RequestError for fields that conflict, and for too much text."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("exactly one of 'prompt' and 'messages' is needed", param="prompt")
        if self.add_special_tokens not in (None, self.messages is None):
            raise RequestError(
                f"'add_special_tokens': {str(self.add_special_tokens).lower()} is not supported here",
                "a prompt gets the tokens that its tokenizer adds, messages those of their template alone",
                "leave it out",
                param="add_special_tokens",
                code="unsupported_parameter",
            )
        if self.messages is not None:
            tools = tuple(tool.function.function().told() for tool in self.tools)
            asked = conversation(self.messages, self.add_generation_prompt, self.continue_final_message)
            return replace(asked, tools=tools, template_options=self.chat_template_kwargs)
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name):
                raise RequestError(f"'{name}' goes only with 'messages'", param=name)
        require_short([self.prompt or ""], "prompt")
        return self.prompt or ""


class Tokenized(Struct):
    """`max_model_len` is what prompt and answer may have together here, in tokens. `token_strs` is always null."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: None = None


class DetokenizeBody(Fields, kw_only=True):
    tokens: tuple[TokenId, ...]
    model: str | None = None


class Detokenized(Struct):
    prompt: str
