"""What `core doctor` shows of a quantizer on a device."""

from collections.abc import Callable

import torch

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def describe(kernel_works: Callable[[torch.dtype], bool]) -> str:
    fast = [name for name, dtype in _DTYPES.items() if kernel_works(dtype)]
    portable = [name for name in _DTYPES if name not in fast]
    said = []
    if fast:
        said.append(f"torch's kernel in {', '.join(fast)}")
    if portable:
        said.append(f"dequantised for each product in {', '.join(portable)}")
    return "; ".join(said)
