"""KV caches in 8 bits against those in the compute dtype: perplexity of the demo's model, bytes held, and decode steps.

Rounds of steps alternate. All times are of this thread alone.
"""

from __future__ import annotations

import argparse
import time

import torch
from _measure import machine, spread, verdict
from perplexity import CPU, Piece, perplexity_of, windows

from core.cli.demo_model import demo_model
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType, KVDType
from core.plugins import PluginHost
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage

WORSE_AT_MOST = 0.01
"""Part of the perplexity with caches in the compute dtype."""
HELD_AT_MOST = 0.55


def fill(stage: Stage, context: int, width: int) -> None:
    """With one session of so many tokens."""
    stage.caches.clear_all()
    for start in range(0, context, 256):
        stage.run(torch.randn(256, width), [Piece(1, start, 256, 1)], outputs_only=True)


def step_seconds(stage: Stage, context: int, width: int) -> float:
    hidden = torch.randn(1, width)
    started = time.thread_time()
    stage.run(hidden, [Piece(1, context, 1, 1)], outputs_only=True)
    return time.thread_time() - started


def compare_steps(stages: list[Stage], context: int, width: int, rounds: int) -> float:
    """Part of the bytes that are held with 8 bits."""
    for stage in stages:
        fill(stage, context, width)
    held = [stage.caches.nbytes for stage in stages]
    times = [[step_seconds(stage, context, width) for stage in stages] for _ in range(rounds + 2)][2:]
    print(f"{context} tokens  {held[0] / 1e6:.1f} MB, {held[1] / held[0]:.3f} of them in 8 bits")
    print(f"  a step    {spread([1e3 * plain for plain, _ in times], 'ms')}")
    print(f"  in 8 bits {spread([packed / plain for plain, packed in times], 'x that')}", flush=True)
    return held[1] / held[0]


def main(limit: int | None, rounds: int, contexts: list[int]) -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    with Model.open(Source(str(demo_model())), plugins) as model:
        precision = Precision(plugins.quantizers.get("fp16"), DType.BF16, DType.BF16)
        texts, layers, width = list(windows(model, limit)), range(model.spec.layers), model.spec.hidden_size
        outer, stack = model.load_embed_and_head(precision, CPU), model.load_layers(layers, precision, CPU)
        stages = [Stage(stack, layers, CPU, precision.residual, nbytes=0, kv=kv) for kv in KVDType]
        plain, packed = (perplexity_of(outer, stage, texts) for stage in stages)
        print(f"perplexity  {plain:.3f} over {sum(map(len, texts))} tokens")
        print(f"  in 8 bits {packed:.3f}, {packed / plain - 1:+.2%}")
        print(verdict(f"worse by {WORSE_AT_MOST:.0%} at most", packed <= (1 + WORSE_AT_MOST) * plain), flush=True)
        held = [compare_steps(stages, context, width, rounds) for context in contexts]
        print(verdict(f"memory <= {HELD_AT_MOST} x", max(held) <= HELD_AT_MOST))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, help="of each text, only so many tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096], help="multiples of 256")
    options = parser.parse_args()
    main(options.limit, options.rounds, options.contexts)
