"""A model in stages, whose logits are held against those of transformers on the same checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from core.interfaces.architecture import EmbedAndHead
from core.interfaces.dtypes import DType
from core.protocol.fields import Segment
from core.protocol.tensors import from_wire, to_wire
from core.runtime.device import torch_dtype
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage

CPU = torch.device("cpu")
TOLERANCE = {DType.FP32: 1e-4, DType.FP16: 0.06, DType.BF16: 0.4}
"""In standard deviations of the logits: about twice what rounding alone was seen to do."""


class Pipeline:
    """Stages one after another, with the wire's conversion between them."""

    def __init__(self, embed_and_head: EmbedAndHead, stages: list[Stage], wire: torch.dtype) -> None:
        self.embed_and_head, self.stages, self.wire = embed_and_head, stages, wire

    @classmethod
    def of(cls, model: Model, precision: Precision, ranges: Sequence[range]) -> Pipeline:
        stages = [model.load_stage(layers, precision, CPU)[0] for layers in ranges]
        return cls(model.load_embed_and_head(precision, CPU), stages, torch_dtype(precision.wire))

    def __call__(self, tokens: Sequence[int], position: int, session: int = 1) -> Tensor:
        """Logits [len(tokens), vocab] of `tokens` at `position`."""
        segment = Segment(session, position, len(tokens), len(tokens))
        with torch.inference_mode():
            hidden = self.embed_and_head.embed(torch.tensor(tokens))
        for stage in self.stages:
            result = stage.run(from_wire(to_wire(hidden, self.wire)), [segment], outputs_only=False)
            hidden = from_wire(to_wire(result, self.wire))
        with torch.inference_mode():
            return self.embed_and_head.logits(hidden)


def splits(layers: int) -> list[list[range]]:
    """The whole, every cut in two, and every cut in three. Of 4 layers, every third one is one of each."""
    whole = [[range(0, layers)]]
    two = [[range(0, a), range(a, layers)] for a in range(1, layers)]
    three = [[range(0, a), range(a, b), range(b, layers)] for a in range(1, layers - 1) for b in range(a + 1, layers)]
    return whole + two + three


def oracle_logits(path: Path, dtype: torch.dtype, tokens: Sequence[int]) -> Tensor:
    """What transformers computes: float32 [len(tokens), vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def random_tokens(*shape: int, seed: int) -> list[int]:
    """Of any tiny checkpoint's vocabulary."""
    tokens: list[int] = torch.randint(0, 250, shape, generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def row_error(found: Tensor, expected: Tensor, model: Model, dtype: DType) -> float:
    """Of the worst row; of a mixture in 16 bits, of the median row: rounding has a row choose another of two experts
    that are all but equal, and those after it attend to that row."""
    some = 0.5 if "num_experts_per_tok" in model.spec.config and dtype is not DType.FP32 else 1.0
    return float((found - expected).abs().amax(dim=1).quantile(some))
