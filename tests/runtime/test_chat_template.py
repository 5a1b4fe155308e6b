"""House rules: transformers' rendering of the same template is the oracle."""

from __future__ import annotations

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
    assert tokenizer.chat_template == "{{ messages[0].content }}!"


def test_tools_and_options_reach_the_template() -> None:
    assert rendered(RICH, Conversation((HELLO,))) == "hello"
    assert rendered(RICH, Conversation((HELLO,), template_options={"enable_thinking": True})) == "hello"
    assert rendered(RICH, Conversation((HELLO,), template_options={"enable_thinking": False})).endswith("</think>")
    assert '"name": "clock"' in rendered(RICH, Conversation((HELLO,), tools=(TOOL,)))


@pytest.mark.parametrize(
    ("template", "role"),
    [("{{ messages[0].role }}", "system"), ("{{ messages[0].role }}{# developer #}", "developer")],
)
def test_a_developer_is_the_system_where_the_template_knows_none(template: str, role: str) -> None:
    assert rendered(template, Conversation(({"role": "developer", "content": "x"},))) == role


@pytest.mark.parametrize(
    ("conversation", "param"),
    [
        (Conversation((HELLO,), tools=(TOOL,)), "tools"),
        (Conversation((HELLO,), template_options={"enable_thinking": False}), "template_options"),
    ],
)
def test_what_the_template_would_pass_over_is_refused(conversation: Conversation, param: str) -> None:
    with pytest.raises(RequestError, match="template") as caught:
        rendered(PLAIN, conversation)
    assert caught.value.param == param


@pytest.mark.parametrize("option", ["chat_template", "tokenize", "messages", "conversation", "padding"])
def test_an_option_can_not_change_how_the_template_is_used(option: str) -> None:
    with pytest.raises(RequestError, match=option) as caught:
        rendered(RICH + "{# chat_template tokenize conversation padding #}", options(option))
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
