"""House rules: transformers' rendering of the same template is the oracle."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from core.errors import RequestError
from core.interfaces.engine import Conversation
from core.runtime.tokenizer import Tokenizer

PLAIN = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "[{{ m.role }}]{{ m['content'] + '\\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
RICH = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
HELLO = {"role": "user", "content": "hello"}


def oracle_with(template: str | None) -> PreTrainedTokenizerFast:
    units = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = FastTokenizer(models.BPE({unit: i for i, unit in enumerate(units)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", chat_template=template)


def rendered(template: str, conversation: Conversation) -> str:
    tokenizer = Tokenizer(oracle_with(template))
    return tokenizer.decode_whole(tokenizer.encode_chat(conversation))


def test_a_conversation_is_as_the_oracle_renders_it_with_one_bos() -> None:
    messages = (HELLO, {"role": "assistant", "content": "hi"})
    oracle = oracle_with(PLAIN)
    ids = Tokenizer(oracle).encode_chat(Conversation(messages))
    expected = oracle.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True)
    assert ids == expected["input_ids"]
    assert ids.count(oracle.bos_token_id) == 1


@pytest.mark.parametrize(
    ("opens", "continues", "end"), [(False, False, "[assistant]h i \n"), (False, True, "[assistant]h i ")]
)
def test_a_prompt_ends_as_it_is_told(opens: bool, continues: bool, end: str) -> None:
    messages = (HELLO, {"role": "assistant", "content": "h i "})
    oracle = oracle_with(PLAIN)
    ids = Tokenizer(oracle).encode_chat(Conversation(messages, opens_answer=opens, continues_last=continues))
    expected = oracle.apply_chat_template(
        list(messages), add_generation_prompt=opens, continue_final_message=continues, tokenize=True
    )
    assert ids == expected["input_ids"]
    assert oracle.decode(ids).endswith(end)


def test_a_template_takes_the_place_of_the_models_own() -> None:
    tokenizer = Tokenizer(oracle_with(PLAIN), chat_template="{{ messages[0].content }}!")
    assert tokenizer.decode_whole(tokenizer.encode_chat(Conversation((HELLO,)))) == "hello!"
    assert tokenizer.chat_prompts.plain is not None
    assert tokenizer.chat_prompts.plain.source == "{{ messages[0].content }}!"


def test_tools_and_options_reach_the_template() -> None:
    assert rendered(RICH, Conversation((HELLO,))) == "hello"
    assert rendered(RICH, Conversation((HELLO,), template_options={"enable_thinking": True})) == "hello"
    assert rendered(RICH, Conversation((HELLO,), template_options={"enable_thinking": False})).endswith("</think>")
    assert '"name": "clock"' in rendered(RICH, Conversation((HELLO,), tools=(TOOL,)))


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("", "system"),
        ("A developer speaks like a 'developer'. {# developer #}{{ 'developer' }}", "system"),
        ("{% if messages[0].role in ['system', 'developer'] %}{% endif %}", "developer"),
        ("{{ {'developer': 'd'}[messages[0].role] }}", "developer"),
        ("{% set said = messages[0].role == 'developer' %}", "developer"),
    ],
)
def test_a_developer_is_the_system_unless_the_template_s_code_knows_one(template: str, role: str) -> None:
    conversation = Conversation(({"role": "developer", "content": "x"},))
    assert rendered(f"{template}|{{{{ messages[0].role + ' says ' + messages[0].content }}}}", conversation).endswith(
        f"|{role} says x"
    )


@pytest.mark.parametrize(
    ("conversation", "param"),
    [
        (Conversation((HELLO,), tools=(TOOL,)), "tools"),
        (Conversation((HELLO,), template_options={"enable_thinking": False}), "template_options"),
    ],
)
def test_what_the_template_would_pass_over_is_refused(conversation: Conversation, param: str) -> None:
    preamble = "You have tools. {# enable_thinking #}{% set tools = 1 %}{{ messages[0].enable_thinking }}"
    with pytest.raises(RequestError, match="template") as caught:
        rendered(preamble + PLAIN, conversation)
    assert caught.value.param == param


@pytest.mark.parametrize("option", ["messages", "tools", "add_generation_prompt", "bos_token", "documents", "range"])
def test_an_option_can_not_change_how_the_template_is_used(option: str) -> None:
    template = RICH + "{{ bos_token }}{{ documents }}{{ add_generation_prompt }}{{ range(1) }}{{ effort }}"
    with pytest.raises(RequestError, match=f"no option '{option}': it has effort, enable_thinking") as caught:
        rendered(template, options(option))
    assert caught.value.param == "template_options"


def options(name: str) -> Conversation:
    return Conversation((HELLO,), template_options={name: "{{ 1 }}"})


def test_a_model_without_a_chat_template_takes_no_messages() -> None:
    with pytest.raises(RequestError, match="takes no messages") as caught:
        Tokenizer(oracle_with(None)).encode_chat(Conversation((HELLO,)))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "system", "content": "be brief"}], "no system role here"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": ["hi"]}], "concatenate"),
        ([], "empty"),
    ],
)
def test_a_template_that_refuses_is_quoted(messages: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        rendered(PLAIN, Conversation(tuple(messages)))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("body", ["{{ 1 / 0 }}", "{{ messages[9].role.x }}", "{{ {}.missing.x }}", "{% bad"])
def test_whatever_a_template_trips_over_is_a_refusal(body: str) -> None:
    with pytest.raises(RequestError, match="refuses"):
        rendered(body, Conversation((HELLO,)))


NAMED = {"default": "default:" + RICH, "tool_use": "tool_use:" + RICH}


@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_of_named_templates_the_one_for_tools_is_taken_if_there_are_tools(tools: tuple[Any, ...]) -> None:
    oracle = oracle_with(None)
    oracle.chat_template = dict(NAMED)
    text = oracle.apply_chat_template([HELLO], tools=list(tools) or None, tokenize=False, add_generation_prompt=True)
    tokenizer = Tokenizer(oracle)
    conversation = Conversation((HELLO,), tools=tools)
    assert tokenizer.chat_prompts.text(conversation) == text
    assert tokenizer.decode_whole(tokenizer.encode_chat(conversation)) == text
    assert text.startswith("tool_use:" if tools else "default:")


def test_a_model_with_only_a_template_for_tools_takes_no_plain_messages() -> None:
    oracle = oracle_with(None)
    oracle.chat_template = {"tool_use": RICH}
    assert Tokenizer(oracle).encode_chat(Conversation((HELLO,), tools=(TOOL,)))
    with pytest.raises(RequestError, match="needs tools"):
        Tokenizer(oracle).encode_chat(Conversation((HELLO,)))


CALL = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
SAID: dict[str, dict[str, Any]] = {
    "system": {"role": "system", "content": "Be brief."},
    "user": HELLO,
    "call": {"role": "assistant", "content": "", "tool_calls": [CALL]},
    "tool": {"role": "tool", "content": '{"time": "12:00"}', "tool_call_id": "c"},
    "thoughts": {"role": "assistant", "content": "<think>hm\n</think>\n\nYes."},
}
LAST_SYSTEM = "{% for m in messages if m.role == 'system' %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content | trim }}{% endfor %}"
TOOLS = "{% for m in messages if m.role == 'tool' %}{{ m.content | tojson }}{% endfor %}"
NAMES = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
CALLS = NAMES + "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
ANSWERS = "{% for m in messages if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].strip() }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said", "dropped"),
    [
        (LAST_SYSTEM + USERS, "system user", ""),
        (LAST_SYSTEM, "system user", "the text of message 2: its role is 'user' and it says 'hello'"),
        (LAST_SYSTEM + USERS, "system user system", "the text of message 1"),
        (USERS, "system", "the text of message 1: its role is 'system' and it says 'Be brief.'"),
        (USERS + " Be brief.", "user system", "the text of message 2"),
        (USERS + CALLS + TOOLS, "user call tool", ""),
        (USERS + TOOLS, "user call tool", "a call of message 2"),
        (USERS + NAMES + TOOLS, "user call tool", "a call's arguments of message 2"),
        (USERS + CALLS, "user call tool", "the text of message 3: its role is 'tool'"),
        (USERS + ANSWERS, "user thoughts user", ""),
        (USERS, "user thoughts user", "the text of message 2: its role is 'assistant' and it says 'Yes.'"),
    ],
)
def test_nothing_that_was_said_is_passed_over(template: str, said: str, dropped: str) -> None:
    conversation = Conversation(tuple(SAID[each] for each in said.split()))
    if not dropped:
        assert rendered(template, conversation)
        return
    with pytest.raises(RequestError, match=re.escape(dropped)) as caught:
        rendered(template, conversation)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("text", ["1234", "abcdef", "0" * 99])
def test_what_stands_around_a_mark_is_none_of_it(text: str) -> None:
    assert text in rendered(USERS, Conversation(tuple({"role": "user", "content": text} for _ in range(3))))


def test_a_template_that_refuses_marked_texts_is_asked_for_the_texts() -> None:
    strict = "{% if messages[0].content != 'Be \"brief\".' %}{{ raise_exception('no') }}{% endif %}"
    conversation = Conversation(({"role": "user", "content": 'Be "brief".'},))
    assert rendered(strict + "{{ messages[0].content | tojson }}", conversation)
    assert rendered(strict + "brief {{ messages[0].content | tojson }}", conversation)
    with pytest.raises(RequestError, match="the text of message 1"):
        rendered(strict + "brief", conversation)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
        "{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{% macro g(n) %}{% if n < 99 %}{% set a = g(n + 1) %}"
        "{% set b = g(n + 1) %}{% endif %}{% endmacro %}{{ g(0) }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.runtime.template_sandbox.MAX_SECONDS", 0.05)
    with pytest.raises(RequestError, match="doesn't end"):
        rendered(template, Conversation((HELLO,)))


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99) %}{{ messages[0].content }}{% endfor %}",
        "{{ 'a' * 999 }}",
        "{{ 999 * 'a' }}",
        "{{ (range(99) | list) * 9 }}",
        "{{ 2 ** 99999 }}",
        "{{ 'a'.center(999) }}",
        "{% set n = namespace(t='ab') %}{% for a in range(9) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "{% set n = namespace(t='ab') %}{% for a in range(9) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "{% set n = namespace(t='ab') %}{% for a in range(9) %}{% set t %}{{ n.t }}{{ n.t }}{% endset %}"
        "{% set n.t = t %}{% endfor %}",
        "{% macro f(t) %}{{ t }}{{ t }}{% endmacro %}{% set a = f(f(f(f(f(f(f('abcde'))))))) %}",
    ],
)
def test_what_a_template_makes_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.runtime.template_sandbox.MAX_CHARACTERS", 300)
    with pytest.raises(RequestError, match="doesn't end"):
        rendered(template, Conversation((HELLO,)))


ODD = (
    "{% generation %}{% set a = 1 %}{% endgeneration %}{{ a is defined }}{% for m in messages %}{% if loop.last %}"
    "{% break %}{% endif %}{{ m.content ~ m.role ~ 1 }}{% endfor %}{{ {'a': '<é>'} | tojson(indent=2) }}"
    "{{ dict(a=1) | tojson(separators=(',', ':')) }}{{ strftime_now('%Y') }}{{ 2 ** 3 + 4 * 5 }}{{ 'ab' * 2 + 'c' }}"
    "{% set n = namespace(x=[1]) %}{% set n.x = n.x + [2] %}{{ n.x }}{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f(1) }}"
    "{{ messages[1].reasoning_content }}{{ messages[1].thinking }}{{ messages[2].content }}"
    "\n  {% if true %}\n{% endif %}"
)


def test_templates_run_as_transformers_runs_them() -> None:
    messages = [HELLO, {"role": "assistant", "content": "hi", "reasoning_content": "hm"}, HELLO]
    oracle = oracle_with(ODD)
    text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Tokenizer(oracle).chat_prompts.text(Conversation(tuple(messages))) == text


def test_a_template_s_namespace_takes_no_internal_names() -> None:
    with pytest.raises(RequestError, match="__class__"):
        rendered("{{ namespace(__class__=1) }}", Conversation((HELLO,)))


def sentencepiece_like() -> PreTrainedTokenizerFast:
    units = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *map(chr, range(33, 127))]
    inner = FastTokenizer(models.BPE({unit: i for i, unit in enumerate(units)}, [], byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


@pytest.mark.parametrize("make", [lambda: oracle_with(None), sentencepiece_like])
def test_a_special_token_that_a_user_types_is_text(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    inner = make()
    inner.add_special_tokens({"eos_token": "</s>"})
    inner.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = Tokenizer(inner)
    ids = tokenizer.encode_chat(Conversation(({"role": "user", "content": "a </s> <</s>s> b"},)))
    assert tokenizer.decode_whole(ids) == "a </s> <</s>s> b</s>"
    assert ids.count(inner.eos_token_id) == 1
    assert ids[-1] == inner.eos_token_id
