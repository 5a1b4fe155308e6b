"""Products of int8 values with activations, in integer arithmetic: no weight is dequantised."""

from functools import cache

import torch
from torch import Tensor

_LARGEST = 127 * 256
"""What an activation's 16 bits hold at most, so that both of their bytes are within int8."""


def multiply_integers(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """x [rows, in_features] times values int8 [out_features, in_features], transposed, times scale [out_features].

    Each row of x is rounded to 16 bits of its largest value, which is finer than the rounding of fp16 or bf16. The
    high and the low bytes are multiplied apart, exactly, and then put together.
    """
    wide = x.float()
    step = wide.abs().amax(dim=1, keepdim=True).clamp_min_(1e-30).div_(_LARGEST)
    steps = wide.div(step).round_()
    high = steps.add(128).div_(256).floor_()
    bytes_ = torch.empty(2, *x.shape, dtype=torch.int8)
    bytes_[0], bytes_[1] = high, steps.sub_(high, alpha=256)
    upper, lower = torch._int_mm(bytes_.view(-1, x.shape[1]), values.t()).float().view(2, len(x), len(scale))
    y: Tensor = upper.mul_(256).add_(lower).mul_(scale).mul_(step).to(x.dtype)
    return y


@cache
def integers_work(device: torch.device) -> bool:
    """Whether int8 products are exact here: those of some processors overflow, in pairs of the largest values."""
    if device.type != "cpu":
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randint(-128, 128, (2, 64, 256), generator=generator, dtype=torch.int8)
    x[0], x[1], weight[0], weight[1] = 127, -128, 127, -127
    try:
        products = torch._int_mm(x, weight.t())
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.equal(products.double(), x.double() @ weight.double().t())
