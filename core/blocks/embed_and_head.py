"""What the coordinator computes: before the first layer and after the last."""

from __future__ import annotations

import torch
from torch import Tensor

from core.blocks.shape import DecoderShape
from core.interfaces.architecture import ModelSpec, Weights


class DecoderEmbedAndHead:
    """Embedding, final norm and head. A tied head is the embedding's own embedding."""

    def __init__(self, spec: ModelSpec, shape: DecoderShape, weights: Weights) -> None:
        self.embedding = weights.embedding("model.embed_tokens.weight")
        self.norm = shape.norm(weights.tensor("model.norm.weight"))
        self.head = self.embedding if spec.tied_head else weights.linear("lm_head")
        self.shape = shape

    def embed(self, tokens: Tensor) -> Tensor:
        return self._scaled(self.embedding.rows(tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._capped(self.head(self.norm(hidden)).float())

    def _scaled(self, embedded: Tensor) -> Tensor:
        scale = self.shape.embedding_scale
        return embedded if scale is None else embedded * embedded.new_tensor(scale)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.shape.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
