"""What a decode step of several sessions costs a stage, against that of one: half of the demo's model, one thread.

Each session has a prompt of its own behind it. Rounds alternate between the numbers of sessions. With --size, one layer
of a larger model instead; with --families, four layers of families without an architecture of their own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _layers import add_options, open_layer, ran_in_settings
from _measure import machine, spread, verdict

from core.cli.demo_model import demo_model
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage
from core.testing.families import tiny_family

CPU = torch.device("cpu")
SESSIONS = (1, 2, 4, 8)
PROMPT = 100
WIDE: dict[str, Any] = {"num_attention_heads": 16, "head_dim": 128, "num_key_value_heads": 4, "hidden_size": 2048}
FAMILIES: dict[str, dict[str, Any]] = {
    "granite": WIDE | {"intermediate_size": 6144},
    "olmoe": WIDE | {"intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 4},
    "lfm2": WIDE | {"intermediate_size": 6144},
    "bamba": WIDE | {"intermediate_size": 6144, "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128},
}
"""Dense, of experts, and hybrids of attention with convolutions or with recurrent states."""
GOAL = 2.0
"""Of a step of four sessions, against that of one."""
WAYS = [("fp16", DType.FP32), ("fp16", DType.BF16), ("fp16", DType.FP16), ("int8", DType.BF16), ("int4", DType.BF16)]


def step_seconds(stage: Stage, lengths: list[int], width: int) -> float:
    """The first sessions, which have `lengths` tokens, decode one row each. Of this thread alone."""
    hidden = torch.randn(len(lengths), width, generator=torch.Generator().manual_seed(len(lengths)))
    segments = [Segment(session, length, 1, 1) for session, length in enumerate(lengths)]
    started = time.thread_time()
    stage.run(hidden, segments, outputs_only=True)
    return time.thread_time() - started


def measure(stage: Stage, width: int, rounds: int) -> dict[int, list[float]]:
    for session in range(max(SESSIONS)):
        stage.run(torch.randn(PROMPT, width), [Segment(session, 0, PROMPT, 1)], outputs_only=True)
    times: dict[int, list[float]] = {sessions: [] for sessions in SESSIONS}
    lengths = [PROMPT] * max(SESSIONS)
    for number in range(rounds + 2):
        for sessions in SESSIONS:
            seconds = step_seconds(stage, lengths[:sessions], width)
            lengths = [length + (session < sessions) for session, length in enumerate(lengths)]
            if number > 1:
                times[sessions].append(seconds)
    return times


def compare(stage: Stage, width: int, rounds: int) -> float:
    """What a step of four sessions costs, against that of one."""
    times = measure(stage, width, rounds)
    print(f"  one session: {spread([1e3 * each for each in times[1]], 'ms')}")
    ratios = {
        sessions: [several / one for several, one in zip(times[sessions], times[1], strict=True)]
        for sessions in SESSIONS[1:]
    }
    for sessions, found in ratios.items():
        print(f"  {sessions} sessions  {spread(found, 'x one')}")
    return statistics.median(ratios[4])


def families(rounds: int) -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    for kind, fields in FAMILIES.items():
        with TemporaryDirectory() as directory:
            path = tiny_family(Path(directory), kind, max_position_embeddings=512, **fields)
            with Model.open(Source(str(path)), plugins) as model:
                precision = Precision(plugins.quantizers.get("fp16"), DType.BF16, DType.BF16)
                stage, _ = model.load_stage(range(model.spec.layers), precision, CPU)
                print(f"{kind} bf16, {stage.nbytes / 1e6:.0f} MB")
                print(verdict(f"four sessions <= {GOAL} x one", compare(stage, model.spec.hidden_size, rounds) <= GOAL))


def main(rounds: int, size: str | None) -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    with open_layer(size, plugins) if size else Model.open(Source(str(demo_model())), plugins) as model:
        for quant, dtype in WAYS:
            precision = Precision(plugins.quantizers.get(quant), dtype, dtype)
            stage, _ = model.load_stage(range((model.spec.layers + 1) // 2), precision, CPU)
            print(f"{quant} {dtype}")
            compare(stage, model.spec.hidden_size, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--families", action="store_true", help="of families that transformers' code computes")
    add_options(parser)
    options = parser.parse_args()
    if options.families:
        families(options.rounds)
    elif not ran_in_settings(options):
        main(options.rounds, options.size)
