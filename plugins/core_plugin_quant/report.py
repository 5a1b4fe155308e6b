"""What the quantizers have in common beside their values: the dtypes to multiply in, and what `core doctor` shows."""

import torch

from core import DType, Quantizer
from core.blocks import fast_dtype, normal

DTYPES = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}


def wide_dtypes(device: torch.device, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What a dequantised weight may be multiplied in where products are wanted in `dtype`."""
    asked = [torch.float32, dtype] if device.type == "cpu" else [fast_dtype(device, dtype)]
    names = {each: str(name) for name, each in DTYPES.items()}
    return {names[each]: each for each in asked}


def describe(quantizer: Quantizer, device: torch.device) -> str:
    """What multiplies on `device` with a weight of usual size, by the compute dtype."""
    said = []
    for name, dtype in DTYPES.items():
        linear = quantizer.pack(normal(1024, 1024, torch.float32, device), None, dtype=dtype, device=device)
        said.append(f"{name}: {linear.kernels.summary()}")  # type: ignore[attr-defined]
    return "; ".join(said)
