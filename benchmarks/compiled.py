"""What `--compile` changes on this machine's CPU: the demo's model in one process on one thread, compiled and not.

Rounds alternate between the two, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from _measure import machine, spread

from core.cli.demo_model import demo_model
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.runtime.bench import Round, WholeModel, made_up_prompt
from core.runtime.model import Model, Precision

CPU = torch.device("cpu")
PROMPT = 128
WAYS = [("fp16", DType.FP32), ("fp16", DType.BF16), ("int8", DType.BF16), ("int4", DType.BF16)]


def ratios(plain: Sequence[float], compiled: Sequence[float]) -> str:
    return spread([one / other for one, other in zip(plain, compiled, strict=True)], "x")


def compare(model: Model, precision: Precision, rounds: int, tokens: int) -> None:
    prompt = made_up_prompt(model, PROMPT, tokens)
    plain = WholeModel(model, precision, CPU)
    started = time.perf_counter()
    compiled = WholeModel(model, precision, CPU, compiles=True)
    took = time.perf_counter() - started
    measured: list[tuple[Round, Round]] = []
    for _ in range(rounds + 1):
        measured.append((plain.measure(prompt, tokens), compiled.measure(prompt, tokens)))
    without, with_it = zip(*measured[1:], strict=True)
    print(f"{precision.quantizer.name} in {precision.compute}: loaded and compiled in {took:.1f} s")
    print(f"  decode   {ratios([each.decode for each in without], [each.decode for each in with_it])}")
    print(f"  prefill  {ratios([each.prefill for each in without], [each.prefill for each in with_it])}", flush=True)


def main(rounds: int, tokens: int) -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    with Model.open(Source(str(demo_model())), plugins) as model:
        for quant, dtype in WAYS:
            compare(model, Precision(plugins.quantizers.get(quant), dtype, dtype), rounds, tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    main(options.rounds, options.tokens)
