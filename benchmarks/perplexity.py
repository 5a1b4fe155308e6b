"""Perplexity of the demo's model in each way to hold its weights, against float32 on the same tokens.

The texts are `prose.txt` beside this script, written for it, and the repository's licence, which the model has seen
often. Each is cut into windows that are predicted apart. The figures do not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from _measure import machine, verdict

from core.cli.demo_model import demo_model
from core.interfaces.architecture import EmbedAndHead
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.plugins import PluginHost
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage
from core.runtime.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
TEXTS = (HERE / "prose.txt", HERE.parent / "LICENSE")
WINDOW = 384
CPU = torch.device("cpu")
MODES = [
    ("fp16", DType.FP32),
    ("fp16", DType.FP16),
    ("fp16", DType.BF16),
    ("int8", DType.FP32),
    ("int8", DType.BF16),
    ("int4", DType.FP32),
    ("int4", DType.BF16),
]
WORSE_AT_MOST = {"fp16": 0.01, "int8": 0.01, "int4": 0.12}
"""Parts of float32's perplexity. int4's is what was measured on this small model, with room."""


class Piece(NamedTuple):
    session: int
    position: int
    rows: int
    outputs: int


def windows(model: Model, limit: int | None) -> Iterator[list[int]]:
    """Of each text the first `limit` tokens."""
    tokenizer = Tokenizer(model.checkpoint.tokenizer())
    for path in TEXTS:
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"))[:limit]
        for start in range(0, len(tokens), WINDOW):
            yield tokens[start : start + WINDOW]


def perplexity(model: Model, precision: Precision, texts: list[list[int]]) -> float:
    outer = model.load_embed_and_head(precision, CPU)
    stage, _ = model.load_stage(range(model.spec.layers), precision, CPU)
    return perplexity_of(outer, stage, texts)


@torch.inference_mode()
def perplexity_of(outer: EmbedAndHead, stage: Stage, texts: list[list[int]]) -> float:
    loss, predicted = 0.0, 0
    for tokens in texts:
        stage.caches.clear_all()
        hidden = stage.run(
            outer.embed(torch.tensor(tokens)), [Piece(1, 0, len(tokens), len(tokens))], outputs_only=False
        )
        loss += float(F.cross_entropy(outer.logits(hidden[:-1]), torch.tensor(tokens[1:]), reduction="sum"))
        predicted += len(tokens) - 1
    return math.exp(loss / predicted)


def main(limit: int | None, keep_head: bool, quants: list[str], dtypes: list[DType]) -> bool:
    """Whether every mode is within its bound."""
    torch.set_num_threads(1)
    print(machine())
    plugins, within = PluginHost.installed(), True
    with Model.open(Source(str(demo_model())), plugins) as model:
        texts = list(windows(model, limit))
        print(f"tokens      {sum(map(len, texts))} in {len(texts)} windows")
        baseline = math.nan
        for quant, dtype in [MODES[0]] + [mode for mode in MODES[1:] if mode[0] in quants and mode[1] in dtypes]:
            precision = Precision(plugins.quantizers.get(quant), dtype, dtype, keep_head)
            found = perplexity(model, precision, texts)
            baseline = found if math.isnan(baseline) else baseline
            worse = found / baseline - 1
            print(f"{quant} {dtype}   {found:.3f}, {worse:+.2%}", flush=True)
            within = within and worse <= WORSE_AT_MOST[quant]
    print(verdict(f"worse by no more than {', '.join(f'{q} {w:.0%}' for q, w in WORSE_AT_MOST.items())}", within))
    return within


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, help="of each text; default: all")
    parser.add_argument("--keep-head", action="store_true")
    parser.add_argument("--quant", nargs="+", default=list(WORSE_AT_MOST), choices=list(WORSE_AT_MOST))
    parser.add_argument("--dtype", nargs="+", default=list(DType), type=DType)
    options = parser.parse_args()
    sys.exit(0 if main(options.tokens, options.keep_head, options.quant, options.dtype) else 1)
