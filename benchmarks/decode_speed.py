"""Decode speed of one stream, split over two node processes, against transformers' `generate` in a process of its own.

Both have the very same weights in the same dtype, and one compute thread per process. Rounds alternate, and while one
side runs, the other waits. A split can't make one stream faster: the goal is that it costs nothing, a ratio of 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import trio
from _measure import QUESTION, answer_lines, local_cluster, machine, open_worker, spread, verdict

from core.cli.demo_model import demo_model
from core.cli.serve import Server
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.interfaces.engine import Conversation, GenerationRequest
from core.plugins import PluginHost

PREDICTED = {DType.FP32: 1.25, DType.BF16: 1.20, DType.FP16: 1.18}
"""What bare layers with fused projections reached against `generate`, before anything was split."""
MESSAGES = [{"role": "user", "content": QUESTION}]


def be_oracle(dtype: DType) -> None:
    """Answers a number of tokens with the text that `generate` makes of them, and its tokens per second."""
    import torch
    import transformers

    from core.runtime.device import torch_dtype

    torch.set_num_threads(1)
    checkpoint = PluginHost.installed().open_checkpoint(Source(str(demo_model())))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config)).eval()
    weights = {name: checkpoint.read(name).to(torch_dtype(dtype)) for name in checkpoint.tensors}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    tokenizer = checkpoint.tokenizer()
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def generate(line: str) -> dict[str, Any]:
        stamps = Stamps()
        made = model.generate(**prompt, max_new_tokens=int(line), do_sample=False, use_cache=True, streamer=stamps)
        text = tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        return {"text": text, "rate": rate(stamps.times)}

    answer_lines(generate)


class Stamps:
    """A streamer for `generate`, which hands it the prompt first, and then each token."""

    def __init__(self) -> None:
        self._calls: list[float] = []

    @property
    def times(self) -> list[float]:
        return self._calls[1:]

    def put(self, value: Any) -> None:
        self._calls.append(time.perf_counter())

    def end(self) -> None:
        pass


def rate(times: list[float]) -> float:
    """Tokens per second, from the first token, which the prefill makes, to the last."""
    return (len(times) - 1) / (times[-1] - times[0])


async def ours(server: Server, tokens: int) -> dict[str, Any]:
    request = GenerationRequest(Conversation(tuple(MESSAGES)), max_tokens=tokens, temperature=0.0)
    times, text = [], ""
    async with server.coordinator.generate(request) as generation:
        async for delta in generation:
            times.append(time.perf_counter())
            text += delta.text
    return {"text": text, "rate": rate(times)}


@dataclass
class Rates:
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    same_text: bool = True

    @property
    def ratios(self) -> list[float]:
        return [mine / other for mine, other in zip(self.ours, self.theirs, strict=True)]


async def measure(dtype: DType, rounds: int, tokens: int) -> Rates:
    rates = Rates()
    async with open_worker(__file__, "--as-oracle", "--dtype", dtype) as oracle:
        await oracle.ask("4")
        async with local_cluster(dtype) as server:
            await ours(server, 4)
            for _ in range(rounds):
                mine, other = await ours(server, tokens), await oracle.ask(str(tokens))
                rates.ours.append(mine["rate"])
                rates.theirs.append(other["rate"])
                rates.same_text &= mine["text"] == other["text"]
    return rates


def report(dtype: DType, rates: Rates) -> bool:
    print(f"\n{dtype}: {len(rates.ours)} rounds")
    print(f"ours        {spread(rates.ours, 'tokens/s', 1)}")
    print(f"generate    {spread(rates.theirs, 'tokens/s', 1)}")
    print(f"ratio       {spread(rates.ratios, digits=3)}; predicted {PREDICTED[dtype]:.2f}")
    print(f"text        {'the same' if rates.same_text else 'not the same: close logits fall differently'}")
    return statistics.median(rates.ratios) >= 1


async def main(options: argparse.Namespace) -> None:
    print(machine())
    for dtype in options.dtype:
        rates = await measure(dtype, options.rounds, options.tokens)
        print(verdict("median ratio >= 1", report(dtype, rates)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", type=DType, nargs="+", default=[DType.FP32, DType.BF16, DType.FP16])
    parser.add_argument("--as-oracle", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_oracle:
        be_oracle(arguments.dtype[0])
    else:
        trio.run(main, arguments)
