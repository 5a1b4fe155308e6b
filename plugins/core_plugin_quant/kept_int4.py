"""Integers of 4 bits in groups, as AWQ, GPTQ, compressed-tensors, MLX, and GGUF's Q4_0 and Q4_1 store them.

They are exactly what `int4` makes of a weight, and are held and multiplied as these are.
"""

import torch
from torch import Tensor

from core import DType, StoredForm, StoredWeight, Values
from core.blocks import nibbles
from core_plugin_quant.int4 import Int4Linear, best_layout, choose, held_bytes
from core_plugin_quant.parts import parts_on

SMALLEST_GROUP, LARGEST_GROUP = 16, 256
"""Of columns, as kernels read them. Of a larger group each part has a copy of the scale."""


class KeptInt4:
    def keeps(self, form: StoredForm) -> bool:
        return form.values is Values.INT4 and form.rows == 1 and group_of(form) >= SMALLEST_GROUP

    def kept_bytes(self, shape: tuple[int, int], form: StoredForm, dtype: DType) -> int:
        return held_bytes(shape, group_of(form), dtype)

    def keep(self, weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Int4Linear:
        rows, columns = weight.shape
        layout = best_layout(rows, group_of(weight.form), dtype, device)
        values = torch.empty(layout.shape(rows, columns), dtype=torch.uint8, device=device)
        for part, packed in parts_on(weight.values, device):
            layout.pack(nibbles(packed), values, part)
        scales = scales_and_zeros(weight, dtype, device)
        return Int4Linear(values, scales, bias, layout, choose(values, scales, layout))


def group_of(form: StoredForm) -> int:
    """How many columns share a scale where they are held: a power of two."""
    return min(form.columns & -form.columns, LARGEST_GROUP)


def scales_and_zeros(weight: StoredWeight, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[in_features / group, out_features, 2] in `dtype`.

    What a scale is rounded by to be in `dtype`, its zero is scaled by as well: so the error is relative to the value.
    """
    scales = weight.scales.to(device, torch.float32) * weight.factor
    zeros = weight.zeros.to(device, torch.float32) if weight.zeros is not None else torch.zeros_like(scales)
    rounded = scales.to(dtype).float()
    zeros = zeros * (rounded / scales).where(scales != 0, 1)
    pairs = torch.stack((rounded.t(), zeros.t()), dim=-1).to(dtype)
    return pairs.repeat_interleave(weight.form.columns // group_of(weight.form), 0).contiguous()
