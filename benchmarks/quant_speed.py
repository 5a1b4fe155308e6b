"""Decode speed of the demo's model in one process on one thread, for each way to hold its weights.

Nothing is split and nothing crosses a wire: embedding, all layers, head and the greedy choice, one token at a time.
Rounds alternate between the ways, so that what else the machine does hits all alike; ratios are taken within a round.
transformers' `generate` runs on the same weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _measure import QUESTION, generated, machine, spread, verdict

from core.cli.demo_model import demo_model
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.interfaces.engine import Conversation
from core.plugins import PluginHost
from core.runtime.bench import WholeModel
from core.runtime.device import torch_dtype
from core.runtime.model import Model, Precision
from core.runtime.tokenizer import Tokenizer

CPU = torch.device("cpu")
GOAL = 1.15
WAYS = [
    ("fp16", DType.FP32),
    ("fp16", DType.BF16),
    ("fp16", DType.FP16),
    ("int8", DType.BF16),
    ("int8", DType.FP16),
    ("int4", DType.BF16),
    ("int4", DType.FP16),
]


Decode = Callable[[int], float]
"""Decodes so many tokens after the prompt; gives tokens per second."""


def ours(model: Model, precision: Precision, prompt: list[int]) -> Decode:
    whole = WholeModel(model, precision, CPU)
    return lambda count: count / whole.measure(prompt, count).decode


def theirs(model: Model, dtype: DType, prompt: list[int]) -> Decode:
    import transformers

    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**model.checkpoint.config)).eval()
    weights = {name: model.checkpoint.read(name).to(torch_dtype(dtype)) for name in model.checkpoint.tensors}
    oracle.load_state_dict(weights, strict=False, assign=True)
    oracle.tie_weights()
    return lambda count: count / generated(oracle, prompt, count).decode


def kernels(plugins: PluginHost, rounds: int) -> None:
    """One fused gate and up projection of the model, one row, in bf16: torch's kernel against the portable path."""
    weight, x = torch.randn(3072, 576), torch.randn(1, 576, dtype=torch.bfloat16)
    for quant in ("int8", "int4"):
        linear: Any = plugins.quantizers.get(quant).pack(weight, None, dtype=torch.bfloat16, device=CPU)
        if not linear.kernel:
            print(f"{quant}        no kernel of torch's is used here")
            continue
        ratios = []
        for _ in range(10 * rounds):
            fast = _seconds(linear, x)
            linear.kernel = False
            ratios.append(_seconds(linear, x) / fast)
            linear.kernel = True
        print(f"{quant} kernel {spread(ratios, 'x portable', 0)}")


def _seconds(linear: Any, x: torch.Tensor) -> float:
    started = time.perf_counter()
    for _ in range(10):
        linear(x)
    return time.perf_counter() - started


def main(rounds: int, tokens: int) -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    kernels(plugins, rounds)
    with Model.open(Source(str(demo_model())), plugins) as model:
        question = Conversation(({"role": "user", "content": QUESTION},))
        prompt = Tokenizer(model.checkpoint.tokenizer()).encode_chat(question)
        decoders: dict[str, Decode] = {
            f"{quant} {dtype}": ours(model, Precision(plugins.quantizers.get(quant), dtype, dtype), prompt)
            for quant, dtype in WAYS
        }
        decoders |= {f"transformers {dtype}": theirs(model, dtype, prompt) for dtype in DType}
    rates: dict[str, list[float]] = {name: [] for name in decoders}
    for decode in decoders.values():
        decode(2)
    for _ in range(rounds):
        for name, decode in decoders.items():
            rates[name].append(decode(tokens))
    for name, found in rates.items():
        print(f"{name:18}{spread(found, 'tok/s', 1)}")
    for dtype in DType:
        ratios = [
            one / other for one, other in zip(rates[f"fp16 {dtype}"], rates[f"transformers {dtype}"], strict=True)
        ]
        print(f"{dtype} / transformers   {spread(ratios)}")
        print(verdict(f"{GOAL} x transformers in {dtype}", statistics.median(ratios) >= GOAL))
    for quant in ("int8 bf16", "int4 bf16"):
        for name in [name for name in rates if not name.startswith("int")]:
            ratios = [one / other for one, other in zip(rates[quant], rates[name], strict=True)]
            print(f"{quant} / {name:18}{spread(ratios)}")
    fastest = max(sum(found) for name, found in rates.items() if not name.startswith("int"))
    print(verdict("int4 in bf16 is faster than any that is not quantized", sum(rates["int4 bf16"]) > fastest))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    main(options.rounds, options.tokens)
