"""int4 decode beside llama.cpp's: the same Q4_1 file of the demo's model, one thread each, and where our time goes.

Needs the extra `benchmarks`, which builds llama.cpp: pip install -e '.[benchmarks]'. Both decode greedily after the
same prompt, in rounds that alternate; ratios are taken within a round. The file's 4-bit weights are llama.cpp's as they
are; core dequantises them and packs them anew in int4.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from _measure import machine, spread, verdict

from core.cli.demo_model import demo_model
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.runtime.bench import Profile, WholeModel, made_up_prompt
from core.runtime.model import Model, Precision

CPU = torch.device("cpu")
GOAL = 0.6
PROMPT = 64


def theirs(llama: Any, prompt: list[int], tokens: int) -> float:
    """Seconds for `tokens` tokens after the first."""
    llama.reset()
    llama.eval(prompt)
    token = llama.sample(temp=0.0)
    started = time.perf_counter()
    for _ in range(tokens):
        llama.eval([token])
        token = llama.sample(temp=0.0)
    return time.perf_counter() - started


def report(profile: Profile) -> None:
    """Where a token's milliseconds go, largest first."""
    parts = {kind.name: kind.seconds for kind in profile.kinds}
    parts |= {"dispatch": profile.dispatch, "head": profile.head, "embedding": profile.embed}
    parts["sampling"] = profile.sampling
    whole = profile.embed + profile.layers + profile.head + profile.sampling
    shown = sorted(parts.items(), key=lambda part: -part[1])
    print(
        "ours, of which", ", ".join(f"{name} {1e3 * seconds:.2f} ms ({seconds / whole:.0%})" for name, seconds in shown)
    )


def main(llama: Any, rounds: int, tokens: int) -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    with Model.open(Source(str(demo_model())), plugins) as model:
        whole = WholeModel(model, Precision(plugins.quantizers.get("int4"), DType.BF16, DType.BF16), CPU)
        prompt = made_up_prompt(model, PROMPT, tokens + 1)
    whole.measure(prompt, 2)
    theirs(llama, prompt, 2)
    ours, other = [], []
    for _ in range(rounds):
        ours.append(tokens / whole.measure(prompt, tokens).decode)
        other.append(tokens / theirs(llama, prompt, tokens))
    ratios = [mine / yours for mine, yours in zip(ours, other, strict=True)]
    print(f"core int4 bf16   {spread(ours, 'tok/s', 1)}")
    print(f"llama.cpp Q4_1   {spread(other, 'tok/s', 1)}")
    print(f"core / llama.cpp {spread(ratios)}")
    report(whole.profile(prompt, tokens))
    print(verdict(f"{GOAL} x llama.cpp", statistics.median(ratios) >= GOAL))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    try:
        from llama_cpp import Llama
    except ImportError:
        sys.exit("this benchmark needs llama.cpp: pip install -e '.[benchmarks]' (it is built, which takes minutes)")
    main(
        Llama(str(demo_model()), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False),
        options.rounds,
        options.tokens,
    )
