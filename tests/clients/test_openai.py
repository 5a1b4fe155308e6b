"""The official client. It runs in a thread, where its requests are ordinary blocking or asyncio ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

T = TypeVar("T")
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
GREEDY: dict[str, Any] = {**ASK, "temperature": 0}


async def using(served: Any, talk: Callable[[openai.OpenAI], T], key: str | None = None) -> T:
    def run() -> T:
        with openai.OpenAI(base_url=served.url, api_key=key or served.key, max_retries=0, timeout=300) as client:
            return talk(client)

    return await trio.to_thread.run_sync(run)


async def test_a_stream_says_what_a_whole_answer_says(served: Any) -> None:
    def talk(client: openai.OpenAI) -> tuple[Any, list[Any]]:
        whole = client.chat.completions.create(**GREEDY)
        return whole, list(
            client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
        )

    whole, chunks = await using(served, talk)
    (choice,) = whole.choices
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == choice.message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


async def test_choices_of_one_seed_differ_and_come_again(served: Any) -> None:
    def talk(client: openai.OpenAI) -> list[list[str | None]]:
        answers = [client.chat.completions.create(**ASK, n=3, seed=5, temperature=1.5) for _ in range(2)]
        return [[choice.message.content for choice in answer.choices] for answer in answers]

    first, again = await using(served, talk)
    assert first == again
    assert len(set(first)) == 3


async def test_log_probabilities_are_those_of_the_model(served: Any, checkpoint: Path) -> None:
    prompt = list(range(40, 60))

    def talk(client: openai.OpenAI) -> Any:
        asked: Any = {"model": "tiny", "prompt": [prompt, prompt[:5]], "echo": True, "logprobs": 2}
        return client.completions.create(**asked, max_tokens=3, temperature=0)

    answer = await using(served, talk)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for choice, length in zip(answer.choices, (20, 5), strict=True):
        told = choice.logprobs
        assert len(told.tokens) == len(told.text_offset) == length + 3
        assert told.token_logprobs[0] is None
        reference = [float(expected[i, prompt[i + 1]]) for i in range(length - 1)]
        assert told.token_logprobs[1:length] == pytest.approx(reference, abs=1e-3)
        likeliest = [float(each) for each in expected[: length - 1].amax(-1)]
        assert [max(top.values()) for top in told.top_logprobs[1:length]] == pytest.approx(likeliest, abs=1e-3)
        assert told.text_offset[: length + 1] == list(range(length + 1))


async def test_a_prompt_alone_may_be_scored(served: Any) -> None:
    def talk(client: openai.OpenAI) -> Any:
        return client.completions.create(model="tiny", prompt="Hello there", echo=True, logprobs=0, max_tokens=0)

    answer = await using(served, talk)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("Hello there", "length")
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 0


async def test_a_bias_decides_the_token(served: Any) -> None:
    def talk(client: openai.OpenAI) -> Any:
        return client.chat.completions.create(**GREEDY, logit_bias={"70": 100}, logprobs=True, top_logprobs=3)

    (choice,) = (await using(served, talk)).choices
    tokens = choice.logprobs.content
    assert len(tokens) == 12
    assert {each.token for each in tokens} == {tokens[0].token}
    assert all(len(each.top_logprobs) == 3 for each in tokens)
    assert "".join(each.token for each in tokens) == choice.message.content


async def test_a_stop_string_ends_the_text_before_it(served: Any) -> None:
    def talk(client: openai.OpenAI) -> tuple[Any, Any]:
        whole = client.chat.completions.create(**GREEDY)
        stop = (whole.choices[0].message.content or "")[5:7]
        return whole, client.chat.completions.create(**GREEDY, stop=[stop])

    whole, stopped = await using(served, talk)
    text = whole.choices[0].message.content
    assert stopped.choices[0].message.content == text[: text.index(text[5:7])]
    assert stopped.choices[0].finish_reason == "stop"


async def test_many_streams_of_the_asyncio_client_and_one_that_is_left(served: Any) -> None:
    async def read(client: openai.AsyncOpenAI, chunks: int) -> str:
        text = ""
        async with await client.chat.completions.create(**GREEDY, stream=True) as stream:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                chunks -= 1
                if not chunks:
                    break
        return text

    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key=served.key, max_retries=0, timeout=300) as client:
            return await asyncio.gather(read(client, 3), *(read(client, 1000) for _ in range(6)))

    left, *whole = await trio.to_thread.run_sync(lambda: asyncio.run(talk()))
    assert len(set(whole)) == 1
    assert whole[0].startswith(left)
    await served.cluster.until(lambda status: status.sessions == 0)


async def test_what_is_refused_is_the_exception_that_the_client_has_for_it(served: Any) -> None:
    def wrong_field(client: openai.OpenAI) -> None:
        client.chat.completions.create(**GREEDY, store=True)

    def wrong_model(client: openai.OpenAI) -> None:
        client.chat.completions.create(**{**GREEDY, "model": "gpt-4o"})

    def too_long(client: openai.OpenAI) -> None:
        client.completions.create(model="tiny", prompt="Hello", max_tokens=100_000)

    with pytest.raises(openai.BadRequestError) as refused:
        await using(served, wrong_field)
    assert refused.value.param == "store"
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        await using(served, wrong_model)
    with pytest.raises(openai.BadRequestError) as long:
        await using(served, too_long)
    assert (long.value.param, long.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.AuthenticationError):
        await using(served, lambda client: client.models.list(), key="another")


async def test_the_models_and_their_tokens_are_told(served: Any) -> None:
    def talk(client: openai.OpenAI) -> Any:
        (model,) = client.models.list()
        tokens = client.with_options(base_url=served.url.removesuffix("/v1")).post(
            "/tokenize", body={"prompt": "Hello there"}, cast_to=dict[str, Any]
        )
        return model, tokens, client.completions.create(model=model.id, prompt=tokens["tokens"], max_tokens=1)

    model, tokens, completion = await using(served, talk)
    assert model.model_extra["max_model_len"] == tokens["max_model_len"] > 0
    assert completion.usage.prompt_tokens == tokens["count"]
