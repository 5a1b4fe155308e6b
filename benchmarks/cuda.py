"""What a CUDA device computes, against this machine's CPU; and how fast, against transformers on the same device.

First every quantizer in every dtype, and every family's tiny checkpoint: logits on the device are those on the CPU,
within the dtype's tolerance. Then prefill and decode of a made-up qwen2 of 1.5B parameters. Takes less than five
minutes on a current GPU, with 4 GB of disk for the made-up model. `--device cpu --small` tries the script itself;
`--compile` also takes compiled layers, where core has the family's own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from _measure import generated, machine, spread
from torch import Tensor

from core.errors import CoreError
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.runtime.bench import WholeModel, made_up_prompt, refuse_too_large
from core.runtime.device import give_back_memory, torch_dtype
from core.runtime.model import Model, Precision
from core.testing.checkpoints import ModelType, tiny_checkpoint
from core.testing.families import tiny_family

CPU = torch.device("cpu")
TOLERANCE = {DType.FP32: 0.01, DType.FP16: 0.1, DType.BF16: 0.5}
"""In standard deviations of the logits."""
OTHERS = ("gpt2", "bloom", "falcon", "cohere2", "gpt_neox", "granite", "olmoe", "minicpm3", "qwen3_next", "lfm2")
"""Families that transformers' own code computes."""
PROMPT, FIRST, STEPS = 20, 12, 4
BIG: dict[str, Any] = {
    "layers": 28,
    "hidden_size": 1536,
    "intermediate": 8960,
    "heads": 12,
    "kv_heads": 2,
    "vocab": 151_936,
    "max_position_embeddings": 4096,
}


def logits(
    path: Path, precision: Precision, device: torch.device, plugins: PluginHost, *, compiles: bool = False
) -> Tensor:
    """float32 [2 + STEPS, vocab] on the CPU: after a prompt's first part and its rest, and each token behind it."""
    with Model.open(Source(str(path)), plugins) as model:
        whole = WholeModel(model, precision, device, compiles=compiles)
        tokens = made_up_prompt(model, PROMPT, STEPS)
        given = [whole.logits(tokens[:FIRST], 0), whole.logits(tokens[FIRST:], FIRST)]
        given += [whole.logits([step], PROMPT + step) for step in range(STEPS)]
    return torch.cat([row.float().cpu() for row in given])


def compare(
    name: str, path: Path, precision: Precision, device: torch.device, plugins: PluginHost, *, compiles: bool = False
) -> bool:
    """Prints a row; whether the device's logits are the CPU's."""
    bound = TOLERANCE[precision.compute]
    try:
        expected = logits(path, precision, CPU, plugins)
        found = logits(path, precision, device, plugins, compiles=compiles)
    except (CoreError, RuntimeError, TypeError) as error:
        print(f"{name:24}{precision.quantizer.name:6}{precision.compute:6}FAILED: {error}", flush=True)
        return False
    difference = float((found - expected).abs().max() / expected.std())
    same = difference <= bound
    print(
        f"{name:24}{precision.quantizer.name:6}{precision.compute:6}{difference:.1e} of {bound:g} std  "
        f"{'ok' if same else 'MISMATCH'}",
        flush=True,
    )
    return same


def comparisons(directory: Path, plugins: PluginHost, *, small: bool) -> Iterator[tuple[str, Path, Precision]]:
    kinds: tuple[ModelType, ...] = ("llama", "gemma2") if small else get_args(ModelType)
    for kind in kinds:
        path = tiny_checkpoint(directory / kind, model_type=kind)
        yield kind, path, Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)
    for other in OTHERS[:1] if small else OTHERS:
        path = tiny_family(directory / other, other)
        yield other, path, Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)
    for quant in plugins.quantizers.names():
        for dtype in DType:
            yield "llama", directory / "llama", Precision(plugins.quantizers.get(quant), dtype, dtype)


def speed(
    path: Path,
    device: torch.device,
    plugins: PluginHost,
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    ways: Sequence[bool],
) -> None:
    """Of each quantizer, compiled or not as `ways` say."""
    with Model.open(Source(str(path)), plugins) as model:
        prompt = made_up_prompt(model, prompt_tokens, tokens + 1)
        for quant, compiles in product(plugins.quantizers.names(), ways):
            precision = Precision(plugins.quantizers.get(quant), DType.BF16, DType.BF16)
            refuse_too_large(model, precision, device, prompt_tokens + tokens)
            whole = WholeModel(model, precision, device, compiles=compiles)
            whole.measure(prompt, 2)
            name = f"core {quant} bf16{' compiled' if compiles else ''}"
            report(name, prompt_tokens, tokens, [whole.measure(prompt, tokens) for _ in range(rounds)])
            del whole
            give_back_memory(device)
    import transformers

    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype(DType.BF16)).eval().to(device)
    generated(oracle, prompt, 2)
    report("transformers bf16", prompt_tokens, tokens, [generated(oracle, prompt, tokens) for _ in range(rounds)])


def report(name: str, prompt_tokens: int, tokens: int, rounds: list[Any]) -> None:
    prefill = spread([prompt_tokens / each.prefill for each in rounds], "tok/s", 0)
    decode = spread([tokens / each.decode for each in rounds], "tok/s", 1)
    print(f"{name:24}prefill {prefill}; decode {decode}", flush=True)


def main(device: torch.device, *, small: bool, compiles: bool) -> int:
    """The exit status: 1 where anything differs from the CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(f"{machine()}, {name}")
    plugins = PluginHost.installed()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        same = [
            compare(kind, path, precision, device, plugins)
            for kind, path, precision in comparisons(directory, plugins, small=small)
        ]
        if compiles:
            same += [
                compare(f"{kind} compiled", path, precision, device, plugins, compiles=True)
                for kind, path, precision in comparisons(directory, plugins, small=small)
                if kind not in OTHERS
            ]
        big = {} if small else BIG
        path = tiny_checkpoint(directory / "big", model_type="qwen2", dtype=torch.bfloat16, **big)
        prompt_tokens, tokens, rounds = (32, 4, 1) if small else (512, 64, 4)
        speed(path, device, plugins, prompt_tokens, tokens, rounds, [False, True] if compiles else [False])
    print(f"{sum(same)} of {len(same)} as on the CPU")
    return 0 if all(same) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--small", action="store_true", help="a few families, and a tiny model for the speeds")
    parser.add_argument("--compile", action="store_true", help="compiled layers, too")
    options = parser.parse_args()
    if options.device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, and torch sees none here")
    sys.exit(main(options.device, small=options.small, compiles=options.compile))
