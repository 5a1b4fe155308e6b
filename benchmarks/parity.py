"""How far correct results of core.parity are apart, by compute dtype: what its bounds stand on.

Each result is held against those of other kernels on this CPU: products converted to float32 or not, packed weights
multiplied by torch's kernels or dequantised, attention fused or not, oneDNN or not, one thread or two. The models are
the demo's and a tiny one of each family; the quantizers are all that come with core.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from _measure import machine
from torch.nn.attention import SDPBackend, sdpa_kernel

import core.runtime.kernel_choice
import core.runtime.kv_cache
import core.runtime.unquantized
from core.cli.demo_model import demo_model
from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType
from core.parity import BOUNDS, Results, row_errors, run_layer, run_operations
from core.plugins import PluginHost
from core.runtime.kernel_choice import Kernels
from core.runtime.model import Model, Precision
from core.testing.checkpoints import ModelType, tiny_checkpoint
from core.testing.families import tiny_family

CPU = torch.device("cpu")
BY_TRANSFORMERS = ("olmoe", "granite", "olmo2", "mamba")


@contextmanager
def converting(always: bool) -> Iterator[None]:
    """Products in float32, or in the dtype itself; packed weights dequantised either way."""

    def dtype(_: Any, given: torch.dtype) -> torch.dtype:
        return torch.float32 if always else given

    def only(kernels: Mapping[str, Any], times: Any = None) -> Kernels[Any]:
        found = [name for name in kernels if ("fp32" in name) is always and name not in ("packed", "in integers")]
        return Kernels({name: kernels[name] for name in found or kernels})

    with ExitStack() as stack:
        stack.enter_context(patch.object(core.runtime.kv_cache, "fast_dtype", dtype))
        for module in (core.runtime.kernel_choice, core.runtime.unquantized):
            stack.enter_context(patch.object(module, "Kernels", only))
        yield


@contextmanager
def plain_torch() -> Iterator[None]:
    torch.set_num_threads(2)
    try:
        with sdpa_kernel([SDPBackend.MATH]), torch.backends.mkldnn.flags(enabled=False):
            yield
    finally:
        torch.set_num_threads(1)


def ways() -> Iterator[AbstractContextManager[None]]:
    yield converting(True)
    yield converting(False)
    yield plain_torch()


def apart(run: Callable[[], Results]) -> Iterator[tuple[Results, Results]]:
    usual = run()
    for way in ways():
        with way:
            yield usual, run()


def models(root: Path) -> Iterator[Path]:
    yield demo_model()
    for family in get_args(ModelType):
        yield tiny_checkpoint(root / family, model_type=family, layers=2)
    for family in BY_TRANSFORMERS:
        yield tiny_family(root / family, family)


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    plugins = PluginHost.installed()
    quantizers = [plugins.quantizers.get(name) for name in plugins.quantizers.names()]
    precisions = [Precision(quantizer, dtype, dtype) for quantizer in quantizers for dtype in DType]
    worst: dict[DType, dict[float, float]] = {dtype: defaultdict(float) for dtype in DType}

    def compare(dtype: DType, run: Callable[[], Results]) -> None:
        for usual, other in apart(run):
            for name in usual:
                error, allowed = BOUNDS[dtype].judge(name, row_errors(other[name], usual[name]))
                worst[dtype][allowed] = max(worst[dtype][allowed], float(error))

    for precision in precisions:
        compare(precision.compute, partial(run_operations, precision, CPU))
    with tempfile.TemporaryDirectory() as root:
        for path in models(Path(root)):
            with Model.open(Source(str(path)), plugins) as model:
                for precision in precisions:
                    for layer in sorted({0, 1, model.spec.layers // 2, model.spec.layers - 1}):
                        compare(precision.compute, partial(run_layer, model, layer, precision, CPU))
    for dtype, bound in BOUNDS.items():
        for what, allowed in (("products", bound.product), ("other operations", bound.other), ("layers", bound.layer)):
            print(f"{dtype}  {what:16}  {worst[dtype][allowed]:.0e}  of {allowed:.0e} that are allowed")


if __name__ == "__main__":
    main()
