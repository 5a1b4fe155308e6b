"""What the coordinator computes: before the first layer and after the last."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from core.blocks.norm import RMSNorm
from core.interfaces.architecture import ModelSpec, Weights


class DecoderEnds:
    """Embedding, final norm and head. A tied head is packed from the embedding's own table."""

    def __init__(self, spec: ModelSpec, eps: float, weights: Weights) -> None:
        self.table = weights.tensor("model.embed_tokens.weight")
        self.norm = RMSNorm(weights.tensor("model.norm.weight"), eps)
        self.head = weights.pack(self.table) if spec.tied_head else weights.linear("lm_head")

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.table)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden)).float()
