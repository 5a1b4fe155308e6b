"""Linear layers: the tensors of each."""

from __future__ import annotations

from core.interfaces.architecture import TensorSpec


def linear_tensors(module: str, rows: int, columns: int, bias: bool = False) -> tuple[TensorSpec, ...]:
    """The weight of `module`, [rows, columns], and its bias where it has one."""
    weight = TensorSpec(f"{module}.weight", (rows, columns), packed=True)
    return (weight, TensorSpec(f"{module}.bias", (rows,))) if bias else (weight,)
