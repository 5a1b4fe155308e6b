"""What the cluster answers is what transformers answers, whatever the split, and however it is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import trio

from core.testing.cluster import Cluster, open_cluster

SECONDS = 300
MAX_TOKENS = 48
PROMPTS = [
    "Hello",
    "The layers of one model lie on several machines.",
    "Ünïcödé 漢字 🙂 and all",
    "A token enters at the first layer, " * 30,
]
CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What enters at the first layer?"},
]


def client_of(cluster: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=cluster.api, api_key="none", max_retries=0, timeout=SECONDS)


async def complete(client: openai.AsyncOpenAI, cluster: Cluster, prompt: str, **fields: Any) -> Any:
    fields = {"max_tokens": MAX_TOKENS, "temperature": 0, **fields}
    return await client.completions.create(model=cluster.model, prompt=prompt, **fields)


async def text_of(client: openai.AsyncOpenAI, cluster: Cluster, prompt: str, **fields: Any) -> str:
    return str((await complete(client, cluster, prompt, **fields)).choices[0].text)


async def check_greedy(cluster: Cluster, oracle: Any) -> None:
    async with client_of(cluster) as client:
        for prompt in PROMPTS:
            answer = await complete(client, cluster, prompt)
            ids = oracle.encode(prompt)
            assert answer.usage.prompt_tokens == len(ids)
            oracle.check(answer.choices[0].text, ids, MAX_TOKENS)


async def test_two_nodes_answer_as_the_oracle(pair: Cluster, oracle: Any) -> None:
    with trio.fail_after(SECONDS):
        assert [node["layers"] for node in (await pair.status())["nodes"]] in ([[0, 3], [3, 6]], [[3, 6], [0, 3]])
        await check_greedy(pair, oracle)


async def test_one_node_answers_as_the_oracle(model: Path, oracle: Any) -> None:
    with trio.fail_after(SECONDS):
        async with open_cluster(model, "--dtype", "fp32") as cluster:
            await cluster.start_node("one")
            await cluster.wait_ready()
            assert [node["layers"] for node in (await cluster.status())["nodes"]] == [[0, 6]]
            await check_greedy(cluster, oracle)


async def test_a_stream_is_the_same_text(pair: Cluster) -> None:
    with trio.fail_after(SECONDS):
        async with client_of(pair) as client:
            for prompt in PROMPTS:
                whole = await complete(client, pair, prompt)
                stream = await complete(client, pair, prompt, stream=True, stream_options={"include_usage": True})
                chunks = [chunk async for chunk in stream]
                assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
                assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
                assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


async def test_chat_answers_as_the_oracle_streamed_or_not(pair: Cluster, oracle: Any) -> None:
    fields: Any = {"model": pair.model, "messages": CHAT, "max_tokens": MAX_TOKENS, "temperature": 0}
    with trio.fail_after(SECONDS):
        async with client_of(pair) as client:
            whole = await client.chat.completions.create(**fields)
            stream = await client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
    ids = oracle.encode_chat(CHAT)
    assert whole.usage.prompt_tokens == len(ids)
    assert whole.choices[0].message.role == "assistant"
    oracle.check(whole.choices[0].message.content, ids, MAX_TOKENS)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


async def test_many_at_once_get_what_each_gets_alone(pair: Cluster) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt": "word " * (1 + 40 * i), "max_tokens": 16 + 4 * i, "temperature": 0.9 * (i % 2), "seed": i}
        for i in range(8)
    ]
    together: dict[int, str] = {}

    async def ask(client: openai.AsyncOpenAI, index: int) -> None:
        together[index] = await text_of(client, pair, **asked[index])

    with trio.fail_after(SECONDS):
        async with client_of(pair) as client:
            alone = [await text_of(client, pair, **fields) for fields in asked]
            async with trio.open_nursery() as nursery:
                for index in range(len(asked)):
                    nursery.start_soon(ask, client, index)
    assert [together[index] for index in range(len(asked))] == alone
    assert len(set(alone)) == len(alone), "equal answers would hide a mix-up"


async def test_a_seed_decides_what_is_drawn(pair: Cluster) -> None:
    with trio.fail_after(SECONDS):
        async with client_of(pair) as client:
            drawn = [await text_of(client, pair, "Hello", temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


async def test_a_stop_string_ends_the_text_before_it(pair: Cluster) -> None:
    with trio.fail_after(SECONDS):
        async with client_of(pair) as client:
            whole = await text_of(client, pair, "Hello")
            stop = whole[10:14]
            answer = await complete(client, pair, "Hello", stop=["never comes", stop])
            pieces = [
                chunk.choices[0].text async for chunk in await complete(client, pair, "Hello", stop=stop, stream=True)
            ]
    assert answer.choices[0].text == "".join(pieces) == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


async def test_max_tokens_is_the_number_of_tokens(pair: Cluster) -> None:
    with trio.fail_after(SECONDS):
        async with client_of(pair) as client:
            answer = await complete(client, pair, "Hello", max_tokens=7)
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", ["completions", "chat"])
async def test_what_does_not_fit_the_context_is_refused_before_anything_is_sent(
    pair: Cluster, ask: str, stream: bool
) -> None:
    async def completions(client: openai.AsyncOpenAI) -> Any:
        return await complete(client, pair, "word " * 10, max_tokens=4096, stream=stream)

    async def chat(client: openai.AsyncOpenAI) -> Any:
        long: Any = [{"role": "user", "content": "word " * 4096}]
        return await client.chat.completions.create(model=pair.model, messages=long, stream=stream)

    calls: dict[str, Callable[[openai.AsyncOpenAI], Any]] = {"completions": completions, "chat": chat}
    with trio.fail_after(SECONDS), pytest.raises(openai.BadRequestError) as refusal:
        async with client_of(pair) as client:
            await calls[ask](client)
    assert refusal.value.code == "context_length_exceeded"
    assert "4096" in refusal.value.message
    assert refusal.value.response.headers["content-type"] == "application/json"
