"""What a decode step of several sessions costs a stage, against that of one: half of the demo's model, one thread.

Each session has a prompt of its own behind it. Rounds alternate between the numbers of sessions. With --size, one layer
of a larger model instead.
"""

from __future__ import annotations

import argparse
import time

import torch
from _layers import add_options, open_layer, ran_in_settings
from _measure import machine, spread

from core.cli.demo_model import demo_model
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage

CPU = torch.device("cpu")
SESSIONS = (1, 2, 4, 8)
PROMPT = 100
WAYS = [("fp16", DType.FP32), ("fp16", DType.BF16), ("fp16", DType.FP16), ("int8", DType.BF16), ("int4", DType.BF16)]


def step_seconds(stage: Stage, sessions: int, width: int) -> float:
    """The first `sessions` sessions decode one row each, at the same position as before. Of this thread alone."""
    hidden = torch.randn(sessions, width, generator=torch.Generator().manual_seed(sessions))
    segments = [Segment(session, PROMPT, 1, 1) for session in range(sessions)]
    started = time.thread_time()
    stage.run(hidden, segments, outputs_only=True)
    return time.thread_time() - started


def measure(stage: Stage, width: int, rounds: int) -> dict[int, list[float]]:
    for session in range(max(SESSIONS)):
        stage.run(torch.randn(PROMPT, width), [Segment(session, 0, PROMPT, 1)], outputs_only=True)
    times: dict[int, list[float]] = {sessions: [] for sessions in SESSIONS}
    for number in range(rounds + 2):
        for sessions in SESSIONS:
            seconds = step_seconds(stage, sessions, width)
            if number > 1:
                times[sessions].append(seconds)
    return times


def main(rounds: int, size: str | None) -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    with open_layer(size, plugins) if size else Model.open(Source(str(demo_model())), plugins) as model:
        for quant, dtype in WAYS:
            precision = Precision(plugins.quantizers.get(quant), dtype, dtype)
            stage, _ = model.load_stage(range((model.spec.layers + 1) // 2), precision, CPU)
            times = measure(stage, model.spec.hidden_size, rounds)
            print(f"{quant} {dtype}, one session: {spread([1e3 * each for each in times[1]], 'ms')}")
            for sessions in SESSIONS[1:]:
                ratios = [several / one for several, one in zip(times[sessions], times[1], strict=True)]
                print(f"  {sessions} sessions  {spread(ratios, 'x one')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    add_options(parser)
    options = parser.parse_args()
    if not ran_in_settings(options):
        main(options.rounds, options.size)
