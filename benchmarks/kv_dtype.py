"""KV caches in 8 bits against those in the compute dtype: perplexity of the demo's model, bytes held, and decode steps.

Rounds of steps alternate. All times are of this thread alone.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median

import torch
from _measure import machine, spread, verdict
from perplexity import CPU, Piece, perplexity, windows

from core.cli.demo_model import demo_model
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType, KVDType
from core.plugins import PluginHost
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage

WORSE_AT_MOST = 0.01
"""Part of the perplexity with caches in the compute dtype."""
HELD_AT_MOST = 0.55
CONTEXTS = (256, 1024, 4096)


def filled(model: Model, precision: Precision, context: int) -> Stage:
    """All layers, with a session of so many tokens."""
    stage, _ = model.load_stage(range(model.spec.layers), precision, CPU)
    for start in range(0, context, 256):
        stage.run(torch.randn(256, model.spec.hidden_size), [Piece(1, start, 256, 1)], outputs_only=True)
    return stage


def step_seconds(stage: Stage, context: int, width: int) -> float:
    hidden = torch.randn(1, width)
    started = time.thread_time()
    stage.run(hidden, [Piece(1, context, 1, 1)], outputs_only=True)
    return time.thread_time() - started


def compare_steps(model: Model, precision: Precision, context: int, rounds: int) -> float:
    """Part of the bytes that are held with 8 bits."""
    stages = [filled(model, each, context) for each in (precision, replace(precision, kv=KVDType.INT8))]
    held = [stage.caches.nbytes for stage in stages]
    times = [[step_seconds(stage, context, model.spec.hidden_size) for stage in stages] for _ in range(rounds + 2)][2:]
    print(f"{context} tokens  {held[0] / 1e6:.1f} MB, {held[1] / held[0]:.3f} of them in 8 bits")
    print(f"  a step    {spread([1e3 * plain for plain, _ in times], 'ms')}")
    print(f"  in 8 bits {spread([packed / plain for plain, packed in times], 'x that')}")
    return held[1] / held[0]


def main(limit: int | None, rounds: int) -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    with Model.open(Source(str(demo_model())), plugins) as model:
        precision = Precision(plugins.quantizers.get("fp16"), DType.BF16, DType.BF16)
        texts = list(windows(model, limit))
        plain, packed = (perplexity(model, replace(precision, kv=kv), texts) for kv in KVDType)
        print(f"perplexity  {plain:.3f} over {sum(map(len, texts))} tokens")
        print(f"  in 8 bits {packed:.3f}, {packed / plain - 1:+.2%}")
        print(verdict(f"worse by {WORSE_AT_MOST:.0%} at most", packed <= (1 + WORSE_AT_MOST) * plain))
        held = [compare_steps(model, precision, context, rounds) for context in CONTEXTS]
        print(verdict(f"memory <= {HELD_AT_MOST} x", median(held) <= HELD_AT_MOST))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, help="of each text, only so many tokens")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    main(options.limit, options.rounds)
