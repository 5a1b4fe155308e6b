"""A mixture of experts with random weights, in one process with one thread, beside transformers in bf16.

The model is a qwen3_moe of about 1B parameters, with 64 experts of which a token goes to 8. Rounds alternate, and
ratios are taken within a round: decode, and a prompt of 512 tokens. Then what a step of several sessions costs, against
that of one. All times are of this thread alone, so that others on the machine count less. Needs about 10 GB of memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _measure import generated, machine, spread, verdict
from batch_cost import SESSIONS, measure

from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.runtime.bench import Round, WholeModel, made_up_prompt
from core.runtime.model import Model, Precision
from core.testing.checkpoints import tiny_checkpoint

CPU = torch.device("cpu")
PROMPT = 512
GOALS = {"int4": 2.5, "fp16": 1.2}
"""Of decode, by quantizer: tokens per second against transformers'."""
MEMORY_GOAL = 0.30
STEP_GOAL = 3.2
"""Of a step of eight sessions in int4, against that of one."""


@contextmanager
def made_up_model(plugins: PluginHost) -> Iterator[tuple[Model, Path]]:
    experts = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 384, "norm_topk_prob": True}
    with TemporaryDirectory() as directory:
        path = tiny_checkpoint(
            Path(directory),
            model_type="qwen3_moe",
            layers=6,
            hidden_size=2048,
            heads=16,
            kv_heads=4,
            intermediate=6144,
            vocab=16_384,
            dtype=torch.bfloat16,
            max_position_embeddings=4096,
            config=experts,
        )
        with Model.open(Source(str(path)), plugins) as model:
            yield model, path


def load_oracle(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def ours(whole: WholeModel, prompt: list[int], tokens: int) -> Round:
    started = time.thread_time()
    token = whole.step(prompt, 0)
    first = time.thread_time()
    for position in range(len(prompt), len(prompt) + tokens):
        token = whole.step([token], position)
    return Round(first - started, time.thread_time() - first)


def compare(model: Model, ways: dict[str, WholeModel], oracle: Any, rounds: int, tokens: int) -> None:
    prompt = made_up_prompt(model, PROMPT, tokens + 1)
    theirs: list[Round] = []
    own: dict[str, list[Round]] = {quant: [] for quant in ways}
    for number in range(rounds + 1):
        found = {quant: ours(whole, prompt, tokens) for quant, whole in ways.items()}
        other = generated(oracle, prompt, tokens, time.thread_time)
        if number > 0:
            theirs.append(other)
            for quant, round_ in found.items():
                own[quant].append(round_)
    print(f"transformers bf16    {spread([tokens / each.decode for each in theirs], 'tok/s', 1)}")
    for quant, rounds_ in own.items():
        decode = [other.decode / mine.decode for mine, other in zip(rounds_, theirs, strict=True)]
        prefill = [other.prefill / mine.prefill for mine, other in zip(rounds_, theirs, strict=True)]
        print(f"{quant} bf16, decode    {spread([tokens / each.decode for each in rounds_], 'tok/s', 1)}")
        print(f"  of transformers'   {spread(decode)}")
        print(f"  {PROMPT} rows, of theirs {spread(prefill)}")
        print(verdict(f"decode >= {GOALS[quant]} x", statistics.median(decode) >= GOALS[quant]))
        print(verdict("prefill >= 1 x", statistics.median(prefill) >= 1))


def compare_steps(model: Model, quant: str, precision: Precision, rounds: int) -> None:
    stage, _ = model.load_stage(range(model.spec.layers), precision, CPU)
    times = measure(stage, model.spec.hidden_size, rounds)
    print(f"{quant} bf16, a step of one session: {spread([1e3 * each for each in times[1]], 'ms')}")
    for sessions in SESSIONS[1:]:
        ratios = [several / one for several, one in zip(times[sessions], times[1], strict=True)]
        print(f"  {sessions} sessions  {spread(ratios, 'x one')}")
    print(verdict(f"eight sessions <= {STEP_GOAL} x one", statistics.median(ratios) <= STEP_GOAL))


def main(rounds: int, tokens: int) -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    precisions = {quant: Precision(plugins.quantizers.get(quant), DType.BF16, DType.BF16) for quant in GOALS}
    with made_up_model(plugins) as (model, path):
        held = {quant: _held_bytes(model, precision) for quant, precision in precisions.items()}
        print(f"model       {held['fp16'] / 2e9:.2f}B parameters; int4 holds {held['int4'] / held['fp16']:.3f} of bf16")
        print(verdict(f"memory <= {MEMORY_GOAL} x", held["int4"] <= MEMORY_GOAL * held["fp16"]))
        ways = {quant: WholeModel(model, precision, CPU) for quant, precision in precisions.items()}
        compare(model, ways, load_oracle(path), rounds, tokens)
        del ways
        for quant, precision in precisions.items():
            compare_steps(model, quant, precision, rounds)


def _held_bytes(model: Model, precision: Precision) -> int:
    layers = sum(model.layer_bytes(layer, precision) for layer in range(model.spec.layers))
    return layers + model.embed_and_head_bytes(precision)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    main(options.rounds, options.tokens)
