"""Conversations in templates of each form: what is rendered of a call reads back as the same call."""

from __future__ import annotations

import json

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.gateway.dialects.calls import CallReader
from core.gateway.dialects.dialect import Dialect, Wishes
from core.gateway.dialects.forms import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, Form
from core.gateway.dialects.grammars import Function
from core.gateway.dialects.pieces import CallArguments, CallBegins, Content
from core.gateway.dialects.template import Template
from core.gateway.dialects.thinking import Thinking
from core.gateway.schemas.items import FunctionCallItem, FunctionCallOutputItem, MessageItem, conversation_of
from core.gateway.schemas.messages import (
    AssistantMessage,
    CalledFunction,
    ToolCall,
    ToolMessage,
    UserMessage,
    conversation,
)
from core.interfaces.engine import Conversation, GenerationRequest
from core.runtime.prompt_template import PromptTemplate

TEMPLATES = {
    HERMES: """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer <tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.role == "tool" %}
<tool_response>{{ message.content }}</tool_response>
{%- elif message.tool_calls %}
{{ message.content }}
{%- for tool_call in message.tool_calls %}{% set call = tool_call.function %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- else %}
{{ message.content }}
{%- endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
""",
    LLAMA: """
{%- if tools %}Respond in the format {"name": function name, "parameters": dictionary of arguments}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" or message.role == "ipython" %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- elif "tool_calls" in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at once") }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{{- '{"name": "' + call.name + '", ' }}{{ '"parameters": ' }}{{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}<|start_header_id|>assistant<|end_header_id|>

""",
    MISTRAL: """
{%- for message in messages %}
{%- if message["role"] == "user" %}
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message["content"] }}[/INST]
{%- elif message["tool_calls"] is defined %}[TOOL_CALLS] [
{%- for tool_call in message["tool_calls"] %}
{%- set out = tool_call.function | tojson %}{{ out[:-1] }}
{%- if tool_call.id | length != 9 %}{{ raise_exception("nine") }}{% endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{% if not loop.last %}, {% endif %}
{%- endfor %}]</s>
{%- elif message["role"] == "tool" %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception("nine") }}{% endif %}
{{- '[TOOL_RESULTS] ' + message["content"] }}
{%- else %} {{ message["content"] }}</s>
{%- endif %}
{%- endfor %}""",
    MISTRAL_NAMED: """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- for tool_call in message.tool_calls %}[TOOL_CALLS]{{ tool_call.function.name }}[ARGS]
{{- tool_call.function.arguments if tool_call.function.arguments is string else tool_call.function.arguments | tojson }}
{%- endfor %}</s>
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}
{%- endfor %}""",
}
FUNCTIONS = (Function("get_weather", "Weather of a city", {"type": "object", "properties": {}}), Function("now"))
ENDS = {HERMES: "<|im_end|>", LLAMA: "<|eot_id|>", MISTRAL: "</s>", MISTRAL_NAMED: "</s>"}


def render(template: str, conversation: Conversation) -> str:
    """As transformers renders it: its environment, and its tojson."""

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(template).render(
        messages=conversation.messages, tools=list(conversation.tools) or None, **conversation.template_options
    )


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_rendered_call_reads_back_as_the_call(form: Form) -> None:
    template = Template(PromptTemplate(TEMPLATES[form]).facts())
    assert template.form == form
    assert template.knows("tools")
    made = ToolCall(form.new_id(), CalledFunction("get_weather", '{"city": "Zürich", "days": [1, {"a": "}"}]}'))
    messages = [UserMessage("hi"), AssistantMessage(tool_calls=[made]), ToolMessage("22 C", made.id)]
    dialect = Dialect(template, Wishes(functions=FUNCTIONS), {}, Thinking.NONE)
    prompt = dialect.ask(GenerationRequest(conversation(messages))).prompt
    assert isinstance(prompt, Conversation)
    text = render(TEMPLATES[form], prompt)
    assert "Weather of a city" in text
    assert "22 C" in text
    name = text.rindex("get_weather")
    start = text.rindex('{"name"' if form is LLAMA else form.open, 0, name)
    reader = CallReader(form, ["get_weather"])
    pieces = [*reader.push(text[start:].partition(ENDS[form])[0]), *reader.finish()]
    (begins, *rest) = pieces
    assert isinstance(begins, CallBegins)
    assert not any(isinstance(piece, Content) for piece in rest)
    arguments = "".join(piece.text for piece in rest if isinstance(piece, CallArguments))
    assert json.loads(arguments) == json.loads(made.function.arguments)


def test_a_response_s_items_are_the_same_messages() -> None:
    call = ToolCall("c1", CalledFunction("now", "{}"))
    asked = conversation([UserMessage("hi"), AssistantMessage("Hm.", tool_calls=[call]), ToolMessage("3 pm", "c1")])
    items = [
        MessageItem("user", "hi"),
        MessageItem("assistant", "Hm."),
        FunctionCallItem("c1", "now", "{}"),
        FunctionCallOutputItem("c1", "3 pm"),
    ]
    assert conversation_of(None, items) == asked
