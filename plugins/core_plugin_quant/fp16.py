"""`fp16`: weights are not quantized, but stored in the compute dtype that the user chose (fp16, bf16 or fp32)."""

from core.blocks import Plain


class FP16(Plain):
    name = "fp16"
