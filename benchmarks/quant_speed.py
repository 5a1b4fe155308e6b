"""Decode speed of the demo's model in one process on one thread, for each way to hold its weights.

Nothing is split and nothing crosses a wire: embedding, all layers, head and the greedy choice, one token at a time.
Rounds alternate between the ways, so that what else the machine does hits all alike; ratios are taken within a round.
transformers' `generate` runs on the same weights.

With --size, one layer of a larger model instead: what prompts of so many rows take in each way.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _layers import add_options, open_layer, ran_in_settings
from _measure import QUESTION, generated, machine, spread, verdict

from core.cli.demo_model import demo_model
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.interfaces.engine import Conversation
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.bench import WholeModel
from core.runtime.device import torch_dtype
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage
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
DENSE = ("fp16 fp32", "fp16 bf16", "fp16 fp16")
QUANTIZED = ("int8 bf16", "int4 bf16")
PREFILL_GOAL = 0.7
ROWS = (1, 8, 16, 32, 128, 512)

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


def layer(size: str, plugins: PluginHost, rounds: int) -> None:
    """Each way against the fastest whose weights are not quantized."""
    with open_layer(size, plugins) as model:
        stages = {}
        for quant, dtype in WAYS:
            precision = Precision(plugins.quantizers.get(quant), dtype, dtype)
            stages[f"{quant} {dtype}"], _ = model.load_stage(range(1), precision, CPU)
        width = model.spec.hidden_size
    times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in stages}
    for number in range(rounds + 1):
        for rows in ROWS:
            for name, stage in stages.items():
                seconds = prompt_seconds(stage, rows, width)
                if number:
                    times[name][rows].append(seconds)
    best = {rows: min(statistics.median(times[name][rows]) for name in DENSE) for rows in ROWS}
    print(f"{'a ' + size + ' layer, ms (x the best dense)':34}{''.join(f'{rows:>16}' for rows in ROWS)}")
    for name, found in times.items():
        medians = {rows: statistics.median(each) for rows, each in found.items()}
        shown = [f"{1e3 * spent:.2f} ({best[rows] / spent:.2f})" for rows, spent in medians.items()]
        print(f"{name:34}{''.join(f'{each:>16}' for each in shown)}")
    for name in QUANTIZED:
        print(f"{name}, eight rows   {spread(ratios(times[name][8], times[name][1]))} x one row")
        for rows in (128, 512):
            fastest = min(DENSE, key=lambda each: statistics.median(times[each][rows]))
            found = ratios(times[fastest][rows], times[name][rows])
            print(f"{name}, {rows} rows     {spread(found)} x the speed of {fastest}")
            print(verdict(f"{PREFILL_GOAL} x the best dense", statistics.median(found) >= PREFILL_GOAL))


def ratios(over: list[float], under: list[float]) -> list[float]:
    return [one / other for one, other in zip(over, under, strict=True)]


def prompt_seconds(stage: Stage, rows: int, width: int) -> float:
    """Of this thread: what else the machine does is not counted."""
    hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    started = time.thread_time()
    stage.run(hidden, [Segment(1, 0, rows, 1)], outputs_only=True)
    return time.thread_time() - started


def main(rounds: int, tokens: int, size: str | None) -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    if size is not None:
        layer(size, plugins, rounds)
        return
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
        found = ratios(rates[f"fp16 {dtype}"], rates[f"transformers {dtype}"])
        print(f"{dtype} / transformers   {spread(found)}")
        print(verdict(f"{GOAL} x transformers in {dtype}", statistics.median(found) >= GOAL))
    for quant in QUANTIZED:
        for name in [name for name in rates if not name.startswith("int")]:
            print(f"{quant} / {name:18}{spread(ratios(rates[quant], rates[name]))}")
    fastest = max(sum(found) for name, found in rates.items() if not name.startswith("int"))
    print(verdict("int4 in bf16 is faster than any that is not quantized", sum(rates["int4 bf16"]) > fastest))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    add_options(parser)
    options = parser.parse_args()
    if not ran_in_settings(options):
        main(options.rounds, options.tokens, options.size)
