"""What the coordinator computes: before the first layer and after the last."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.blocks.shape import DecoderShape
from core.interfaces.architecture import ModelSpec, Weights


class DecoderEnds:
    """Embedding, final norm and head. A tied head is packed from the embedding's own table."""

    def __init__(self, spec: ModelSpec, shape: DecoderShape, weights: Weights) -> None:
        self.table = weights.tensor("model.embed_tokens.weight")
        self.norm = shape.norm(weights.tensor("model.norm.weight"))
        self.head = weights.pack(self.table) if spec.tied_head else weights.linear("lm_head")
        self.shape = shape

    def embed(self, tokens: Tensor) -> Tensor:
        return self._scaled(F.embedding(tokens, self.table))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._capped(self.head(self.norm(hidden)).float())

    def _scaled(self, embedded: Tensor) -> Tensor:
        scale = self.shape.embedding_scale
        return embedded if scale is None else embedded * embedded.new_tensor(scale)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.shape.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
