"""A stage: one layer range loaded on one device, with the KV caches of its sessions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from core.errors import StageError
from core.guard import compute_layers
from core.interfaces.architecture import LayerStack
from core.interfaces.dtypes import KVDType
from core.runtime.kv_cache import CacheStore, Segment, SegmentBatch


class Stage:
    """Runs batches through `layers`. Not thread-safe: one compute thread owns it.

    The residual stream inside has `residual_dtype`: the wider of the compute and the wire dtype, so that a cast to
    the wire is the only place where it can lose anything.
    """

    def __init__(
        self,
        stack: LayerStack,
        layers: range,
        device: torch.device,
        residual_dtype: torch.dtype,
        *,
        nbytes: int,
        kv: KVDType = KVDType.AUTO,
    ) -> None:
        self.layers = layers
        self.device = device
        self.nbytes = nbytes
        self.caches = CacheStore(layers, kv)
        self.stack = stack
        self.residual_dtype = residual_dtype

    @torch.inference_mode()
    def run(self, hidden: Tensor, segments: Sequence[Segment], *, outputs_only: bool) -> Tensor:
        """[rows of all segments, hidden_size], any dtype and device -> the rows after the last layer, on the device.

        With `outputs_only` just the rows that the segments want back. Raises StageError for rows that don't match
        the segments, a gap in a session's positions, or hidden states that are not finite.
        """
        rows = sum(segment.rows for segment in segments)
        if len(hidden) != rows:
            raise StageError(f"a batch has {len(hidden)} rows", f"its segments count {rows}")
        batch = SegmentBatch(segments, self.caches, self.device)
        arrived = hidden.to(self.device, self.residual_dtype)
        result = compute_layers(self.stack, arrived, batch)
        self._refuse_non_finite(arrived, result)
        batch.commit()
        return result[_output_rows(segments)] if outputs_only else result

    def _refuse_non_finite(self, arrived: Tensor, result: Tensor) -> None:
        # A sum may also overflow: only what failed is looked at closely.
        if math.isfinite(result.sum()) or torch.isfinite(result).all():
            return
        if not torch.isfinite(arrived).all():
            raise StageError(
                "the hidden states that arrived are not finite", "an earlier stage computed NaN or infinity"
            )
        raise StageError(
            f"layers [{self.layers.start}, {self.layers.stop}) computed hidden states that are not finite",
            f"on {self.device}",
            "the model may need --dtype bf16 or fp32, or the device's kernels are broken",
        )


def _output_rows(segments: Sequence[Segment]) -> Tensor | slice:
    """Which rows of the batch are wanted back: the last `outputs` of each segment."""
    if all(segment.outputs == segment.rows for segment in segments):
        return slice(None)
    wanted: list[int] = []
    end = 0
    for segment in segments:
        end += segment.rows
        wanted.extend(range(end - segment.outputs, end))
    return torch.tensor(wanted, dtype=torch.int64)
