"""A real model, SmolLM2-135M-Instruct from a GGUF file: what it knows, and that it is what transformers computes.

transformers gets the tensors as the checkpoint gives them: to read a GGUF file by itself it needs a further library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from core import DType, Source
from core.cli import demo
from core.cli.demo_model import demo_model
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.model import Model, Precision
from core.testing.cluster import Cluster, open_cluster

SECONDS = 900
TOKENS = 32
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHATS = [
    QUESTION,
    [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "user", "content": "Write a Python function that adds two numbers."}],
]
CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""In standard deviations of the logits."""


@pytest.fixture(scope="module")
def path() -> Path:
    return demo_model()


@pytest.fixture(scope="module")
def opened(path: Path) -> Iterator[Model]:
    with Model.open(Source(str(path)), PluginHost.installed()) as model:
        yield model


@pytest.fixture(scope="module")
def transformers_model(opened: Model) -> Any:
    from transformers import AutoConfig, LlamaForCausalLM

    checkpoint = opened.checkpoint
    config = AutoConfig.for_model(**checkpoint.config)
    weights = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle(opened: Model, transformers_model: Any, oracle_of: Callable[[Any, Any], Any]) -> Any:
    return oracle_of(transformers_model, opened.checkpoint.tokenizer())


async def two_nodes(cluster: Cluster) -> None:
    for name in ("one", "two"):
        await cluster.start_node(name)
    await cluster.wait_ready()


async def answer(cluster: Cluster, messages: list[dict[str, str]]) -> Any:
    async with cluster.client() as client:
        body = {"model": cluster.model, "messages": messages, "temperature": 0, "max_tokens": TOKENS}
        return (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()


async def test_two_nodes_in_fp32_answer_as_the_oracle(path: Path, oracle: Any) -> None:
    with trio.fail_after(SECONDS):
        async with open_cluster(path, "--quant", "fp16", "--dtype", "fp32", "--min-nodes", "2") as cluster:
            await two_nodes(cluster)
            for messages in CHATS:
                said = await answer(cluster, messages)
                prompt = oracle.encode_chat(messages)
                assert said["usage"]["prompt_tokens"] == len(prompt)
                oracle.check(said["choices"][0]["message"]["content"], prompt, TOKENS)


@pytest.mark.parametrize(
    ("options", "packed"),
    [(("--quant", "fp16", "--dtype", "fp16"), ("fp16", "fp16")), ((), ("stored", "bf16"))],
    ids=["fp16", "as a friend would choose"],
)
async def test_two_nodes_know_the_capital_of_france(
    path: Path, options: tuple[str, ...], packed: tuple[str, str]
) -> None:
    with trio.fail_after(SECONDS):
        async with open_cluster(path, *options, "--min-nodes", "2") as cluster:
            await two_nodes(cluster)
            status = await cluster.status()
            assert (status["quant"], status["dtype"]) == packed
            assert "perplexity" in status["quality"]
            said = await answer(cluster, [{"role": "user", "content": demo.QUESTION}])
    assert "The capital of France is Paris" in said["choices"][0]["message"]["content"]


def logits(model: Model, cuts: list[int], prompt: list[int], more: list[int]) -> torch.Tensor:
    """Of a prefill of `prompt` and a decode step for each of `more`, through stages cut at `cuts`."""
    precision = Precision(PluginHost.installed().quantizers.get("fp16"), DType.FP32, DType.FP32)
    outer = model.load_embed_and_head(precision, CPU)
    stages = [model.load_stage(range(*cut), precision, CPU)[0] for cut in pairwise(cuts)]
    rows = []
    with torch.inference_mode():
        for position, tokens in [(0, prompt), *((len(prompt) + i, [token]) for i, token in enumerate(more))]:
            hidden = outer.embed(torch.tensor(tokens))
            for stage in stages:
                segment = Segment(1, position, len(tokens), len(tokens))
                hidden = stage.run(hidden, [segment], outputs_only=False)
            rows.append(outer.logits(hidden))
    return torch.cat(rows)


def test_the_logits_are_the_oracles_and_the_same_bits_however_the_layers_are_split(
    opened: Model, transformers_model: Any, oracle: Any
) -> None:
    prompt = oracle.encode_chat(QUESTION)
    more, _ = oracle.greedy(prompt, 8)
    with torch.inference_mode():
        expected = transformers_model(torch.tensor([prompt + more])).logits[0].float()
    whole = logits(opened, [0, 30], prompt, more)
    assert (whole - expected).abs().max() < TOLERANCE * expected.std()
    for cuts in ([0, 13, 30], [0, 7, 20, 30]):
        assert torch.equal(logits(opened, cuts, prompt, more), whole), cuts
