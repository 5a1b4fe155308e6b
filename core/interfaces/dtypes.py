"""The types that a stage computes in, that a hidden state travels in, and that KV caches hold."""

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


class KVDType(StrEnum):
    """What keys and values are cached in."""

    AUTO = "auto"
    """What the stage computes in."""
    INT8 = "int8"
    """Whole numbers, with a scale for each head and token."""
