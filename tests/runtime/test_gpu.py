"""What this machine's GPU computes, CUDA or MPS, is what its CPU does: prefill, decode, and tokens taken back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core import DType, Source
from core.parity import fixed_values
from core.plugins import PluginHost
from core.protocol.fields import Segment
from core.runtime.device import detect
from core.runtime.model import Model, Precision
from core.testing.checkpoints import tiny_checkpoint

DEVICE = torch.device(detect()[0].id)
TOLERANCE = {DType.FP32: 1e-3, DType.FP16: 2e-2, DType.BF16: 1e-1}
"""In standard deviations of what comes out."""
PROMPT, TOKENS = 20, 24
pytestmark = pytest.mark.skipif(DEVICE.type == "cpu", reason="this machine has no GPU")


def computed(model: Model, precision: Precision, device: torch.device) -> Tensor:
    """Rows that pass through two stages: a prompt, single tokens, and then four of these once more."""
    stages = [model.load_stage(range(*ends), precision, device)[0] for ends in pairwise((0, 2, model.spec.layers))]
    values = fixed_values(TOKENS, model.spec.hidden_size, seed=1)
    starts = [0, *range(PROMPT, TOKENS), TOKENS - 4]
    ends = [PROMPT, *range(PROMPT + 1, TOKENS + 1), TOKENS]
    found = []
    for start, end in zip(starts, ends, strict=True):
        hidden = values[start:end]
        for stage in stages:
            hidden = stage.run(hidden, [Segment(1, start, end - start, end - start)], outputs_only=False)
        found.append(hidden.float().cpu())
    return torch.cat(found)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("quant", ["fp16", "int8", "int4"])
def test_it_computes_what_the_cpu_does(tmp_path: Path, quant: str, dtype: DType) -> None:
    tiny_checkpoint(tmp_path, layers=4)
    precision = Precision(PluginHost.installed().quantizers.get(quant), dtype, dtype)
    with Model.open(Source(str(tmp_path)), PluginHost.installed()) as model, torch.inference_mode():
        expected = computed(model, precision, torch.device("cpu"))
        found = computed(model, precision, DEVICE)
    assert (found - expected).abs().max() < TOLERANCE[dtype] * expected.std()
