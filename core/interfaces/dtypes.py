"""The floating-point types that a stage computes in, or that a hidden state travels in."""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def itemsize(self) -> int:
        """Bytes per value."""
        return 4 if self is DType.FP32 else 2
