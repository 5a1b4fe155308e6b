"""One layer, with random weights, of models as large as people run; and the same processor with fewer instructions."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from core.interfaces.checkpoint import Source
from core.plugins import PluginHost
from core.runtime.model import Model
from core.testing.checkpoints import tiny_checkpoint

SIZES = {"1.5B": (1536, 8960, 12, 2), "8B": (4096, 14336, 32, 8)}
"""Hidden size, intermediate size, heads, KV heads."""
SETTINGS = {
    "as it is": {},
    "AVX-512 without AMX": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
"""Variables that torch and its libraries read as they are loaded."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, help="one layer of a model of that size, not the demo's model")
    parser.add_argument("--settings", action="store_true", help="with all instructions, without AMX, with AVX2 alone")


def ran_in_settings(options: argparse.Namespace) -> bool:
    """Whether this benchmark was asked for each setting, and ran in a process of its own for each."""
    if options.settings:
        command = [sys.executable, *(argument for argument in sys.argv if argument != "--settings")]
        for name, variables in SETTINGS.items():
            print(f"\n{name}", flush=True)
            subprocess.run(command, env=os.environ | variables, check=True)
    return bool(options.settings)


@contextmanager
def open_layer(size: str, plugins: PluginHost) -> Iterator[Model]:
    hidden, intermediate, heads, kv_heads = SIZES[size]
    with TemporaryDirectory() as directory:
        path = tiny_checkpoint(
            Path(directory),
            model_type="qwen2",
            layers=1,
            hidden_size=hidden,
            intermediate=intermediate,
            heads=heads,
            kv_heads=kv_heads,
            dtype=torch.bfloat16,
        )
        with Model.open(Source(str(path)), plugins) as model:
            yield model
