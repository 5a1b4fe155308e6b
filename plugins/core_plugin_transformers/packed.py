"""Packed weights in the places of torch modules."""

from __future__ import annotations

from torch import Tensor, nn

from core import Embedding, Linear


class PackedLinear(nn.Module):
    def __init__(self, packed: Linear, like: nn.Linear) -> None:
        super().__init__()
        self.packed = packed
        self.in_features, self.out_features = like.in_features, like.out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self.packed(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    def __init__(self, packed: Embedding) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] -> [..., embedding_dim]."""
        rows = self.packed.rows(ids.reshape(-1))
        return rows.view(*ids.shape, rows.shape[-1])
