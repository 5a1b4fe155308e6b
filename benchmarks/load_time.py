"""How long a node takes to load a third of a model, against reading the same bytes and packing them, and nothing else.

The checkpoint is made up, of llama's shape, in a temporary directory, and lies in the system's cache of files. Each
figure is that of a process of its own, on one thread. A node proves its bytes while it loads, hashing them in another
thread: that is shown beside, for it is the slower of the two where nothing is packed and the disk is as fast as that
cache. Rounds alternate, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _measure import machine, spread, verdict
from load_memory import LAYERS, MB, write_safetensors

from core.interfaces.architecture import TensorSpec
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.runtime.device import set_up_torch, torch_dtype
from core.runtime.manifest import Manifest, Prover, other_file
from core.runtime.model import Model, Precision

CPU = torch.device("cpu")
LAYER_RANGE = range(LAYERS // 3, 2 * LAYERS // 3)
GOAL = 1.3
PRECISIONS = [("fp16", "fp16"), ("fp16", "bf16"), ("int8", "bf16"), ("int4", "bf16")]


def read_and_pack(model: Model, precision: Precision) -> list[object]:
    """What is held in the end."""
    dtype, held = torch_dtype(precision.compute), list[object]()
    for spec in specs(model):
        tensor = read(model, spec.name)
        pack = precision.quantizer.pack
        held.append(pack(tensor, None, dtype=dtype, device=CPU) if spec.packed else tensor.to(dtype))
    return held


def specs(model: Model) -> list[TensorSpec]:
    return [spec for layer in LAYER_RANGE for spec in model.architecture.layer_tensors(model.spec, layer)]


def read(model: Model, name: str) -> torch.Tensor:
    info = model.checkpoint.tensors[name]
    path = model.checkpoint.path(info.file)
    assert path is not None
    stored = torch.empty(info.shape, dtype=torch.float16)
    with path.open("rb", buffering=0) as file:
        file.seek(info.offset)
        assert file.readinto(stored.numpy()) == info.nbytes
    return stored


def load(model: Model, precision: Precision) -> object:
    return model.load_stage(LAYER_RANGE, precision, CPU)


def load_and_prove(model: Model, precision: Precision) -> object:
    """As a node does it, but for the parity check, which computes. The expected digests are remembered ones."""
    proof = Manifest.of(model).proof(LAYER_RANGE)
    assert other_file(model, LAYER_RANGE, proof) is None
    with Prover(model, LAYER_RANGE, proof) as prover:
        stage = model.load_stage(LAYER_RANGE, precision, CPU, seen=prover.seen)
        assert prover.difference() is None
    return stage


WAYS = {way.__name__: way for way in (read_and_pack, load, load_and_prove)}


def seconds(way: str, path: Path, quant: str, dtype: DType) -> float:
    """In a fresh process."""
    set_up_torch(threads=1)
    plugins = PluginHost.installed()
    precision = Precision(plugins.quantizers.get(quant), dtype, dtype)
    with Model.open(Source(str(path)), plugins) as model:
        model.fetch_stage(LAYER_RANGE)
        # What is slow the first time, whatever is read, is not what is measured.
        precision.quantizer.pack(torch.ones(64, 64), None, dtype=torch_dtype(dtype), device=CPU)
        started = time.perf_counter()
        held = WAYS[way](model, precision)
        taken = time.perf_counter() - started
        del held
    return taken


def measured(way: str, path: Path, quant: str, dtype: str) -> float:
    command = [sys.executable, __file__, "--way", way, "--path", str(path), "--quant", quant, "--dtype", dtype]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=100).stdout)


def report(path: Path, quant: str, dtype: str, rounds: int) -> None:
    runs = [[measured(way, path, quant, dtype) for way in WAYS] for _ in range(rounds)]
    packed, loaded, proven = zip(*runs, strict=True)
    ratios = [one / other for one, other in zip(loaded, packed, strict=True)]
    print(f"\n{quant} in {dtype}")
    print(f"to read and pack     {spread(packed, 's')}")
    print(f"to load              {spread(loaded, 's')}; {spread(ratios, 'x')}")
    print(f"to load and prove    {spread(proven, 's')}")
    print(verdict(f"to load in {GOAL} x reading and packing", statistics.median(ratios) <= GOAL), flush=True)


def main(rounds: int) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        path = write_safetensors(Path(scratch) / "model", 1)
        with Model.open(Source(str(path)), PluginHost.installed()) as model:
            stored = sum(model.checkpoint.tensors[spec.name].nbytes for spec in specs(model))
        print(f"stored      {stored / MB:.0f} MB in {len(LAYER_RANGE)} layers")
        for quant, dtype in PRECISIONS:
            report(path, quant, dtype, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    for option in ("--way", "--path", "--quant", "--dtype"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(seconds(options.way, Path(options.path), options.quant, DType(options.dtype)))
    else:
        main(options.rounds)
