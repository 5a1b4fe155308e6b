"""Mixtures of experts: each token goes through the few experts that a router chooses for it (Shazeer et al. 2017)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.blocks.linear import linear_tensors
from core.blocks.mixture import Mixture, Scoring
from core.blocks.mlp import GatedMLP
from core.blocks.shape import DecoderShape
from core.interfaces.architecture import TensorSpec, Weights
from core.interfaces.quantizer import GroupedLinear

_NO_SCORE = 1e-20
"""What keeps scores that add up to nothing from being divided by it."""


class MixtureOfExperts:
    """In an MLP's place: experts of which each computes the rows that chose it, and what all rows share."""

    def __init__(self, shape: DecoderShape, mixture: Mixture, layer: int, weights: Weights) -> None:
        module = _module(mixture, layer)
        self.router = Router(mixture, f"{module}.{mixture.router}", weights)
        self.gate_up, self.down = _experts(mixture, f"{module}.experts", weights)
        self.shared = SharedExpert(shape, mixture, module, weights) if mixture.shared_size else None
        self.gate = mixture.gate
        self.activation = shape.activation
        self.numbers = torch.arange(mixture.experts, device=weights.device)

    @staticmethod
    def tensors(shape: DecoderShape, mixture: Mixture, layer: int) -> tuple[TensorSpec, ...]:
        module = _module(mixture, layer)
        shared = SharedExpert.tensors(shape, mixture, module) if mixture.shared_size else ()
        return (
            *Router.tensors(shape, mixture, f"{module}.{mixture.router}"),
            *_expert_tensors(shape, mixture, f"{module}.experts"),
            *shared,
        )

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        weights = weights.to(x.dtype)
        alone = len(x) == 1 and x.device.type == "cpu"
        mixed = self._row(x, weights, chosen) if alone else self._rows(x, weights, chosen)
        return mixed if self.shared is None else mixed.add_(self.shared(x))

    def _row(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Of one row nothing has to be put in order."""
        experts = chosen[0].tolist()
        results = self.down.each(self._gated(self.gate_up.each(x, experts)), experts)
        return results.mul_(weights.view(-1, 1)).sum(0, keepdim=True)

    def _rows(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [rows, hidden], weights and chosen [rows, experts of a row] -> [rows, hidden]."""
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.bucketize(self.numbers, experts, right=True)
        inner = self._gated(self.gate_up(x.index_select(0, order // chosen.shape[1]), ends))
        results = self.down(inner, ends).index_select(0, order.argsort())
        return results.mul_(weights.view(-1, 1)).view(*chosen.shape, -1).sum(1)

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self.gate is not None:
            return self.gate(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up


class Router:
    """Chooses experts. It computes in float32, so that few choices fall differently on another machine."""

    def __init__(self, mixture: Mixture, module: str, weights: Weights) -> None:
        self.mixture = mixture
        self.weight = weights.tensor(f"{module}.weight")
        self.bias = weights.tensor(f"{module}.bias") if mixture.biased else None
        self.correction = weights.tensor(f"{module}.e_score_correction_bias") if mixture.corrected else None
        self.simple = mixture.scoring is Scoring.SOFTMAX and mixture.groups == 1 and not mixture.corrected

    @staticmethod
    def tensors(shape: DecoderShape, mixture: Mixture, module: str) -> tuple[TensorSpec, ...]:
        biases = ("bias",) * mixture.biased + ("e_score_correction_bias",) * mixture.corrected
        return (
            TensorSpec(f"{module}.weight", (mixture.experts, shape.hidden_size), fp32=True),
            *(TensorSpec(f"{module}.{name}", (mixture.experts,), fp32=True) for name in biases),
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, hidden] -> each row's weights, float32, and experts, int64: [rows, chosen] both."""
        logits = F.linear(x.float(), self.weight, self.bias)
        weights, chosen = self._softmax(logits) if self.simple else self._scored(logits)
        return (weights if self.mixture.scale == 1 else weights * self.mixture.scale), chosen

    def _softmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen ones' part of a softmax that is made to add up to 1 is their own softmax."""
        if self.mixture.normalised:
            best, chosen = logits.topk(self.mixture.chosen)
            return best.softmax(dim=-1), chosen
        weights, chosen = logits.softmax(dim=-1).topk(self.mixture.chosen)
        return weights, chosen

    def _scored(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid() if self.mixture.scoring is Scoring.SIGMOID else logits.softmax(dim=-1)
        ranks = scores if self.correction is None else scores + self.correction
        if self.mixture.groups > self.mixture.groups_chosen:
            ranks = self._of_the_best_groups(ranks)
        chosen = ranks.topk(self.mixture.chosen, sorted=False).indices
        weights = scores.gather(1, chosen)
        if self.mixture.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _NO_SCORE)
        return weights, chosen

    def _of_the_best_groups(self, ranks: Tensor) -> Tensor:
        """`ranks` without the experts of other groups."""
        grouped = ranks.view(len(ranks), self.mixture.groups, -1)
        best = grouped.topk(self.mixture.group_leaders, dim=-1).values.sum(dim=-1)
        taken = best.topk(self.mixture.groups_chosen, dim=-1, sorted=False).indices
        left = torch.ones_like(best, dtype=torch.bool).scatter_(1, taken, False)
        return grouped.masked_fill(left[..., None], -torch.inf).flatten(1)


class SharedExpert:
    """An MLP that every row goes through, gated or not."""

    def __init__(self, shape: DecoderShape, mixture: Mixture, module: str, weights: Weights) -> None:
        self.mlp = GatedMLP(shape, f"{module}.{mixture.shared}", weights)
        self.gate = weights.tensor(f"{module}.{mixture.shared}_gate.weight") if mixture.shared_gate else None

    @staticmethod
    def tensors(shape: DecoderShape, mixture: Mixture, module: str) -> tuple[TensorSpec, ...]:
        gate = (TensorSpec(f"{module}.{mixture.shared}_gate.weight", (1, shape.hidden_size)),)
        return (
            *GatedMLP.tensors(shape, f"{module}.{mixture.shared}", mixture.shared_size),
            *gate * mixture.shared_gate,
        )

    def __call__(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y if self.gate is None else y * (x * self.gate).sum(dim=-1, keepdim=True).sigmoid()


def _module(mixture: Mixture, layer: int) -> str:
    return f"model.layers.{layer}.{mixture.block}"


def _experts(mixture: Mixture, module: str, weights: Weights) -> tuple[GroupedLinear, GroupedLinear]:
    """Gate and up in one product, and down."""
    if mixture.fused:
        names = ("gate_up_proj", "down_proj")
        gate_up, down = (
            weights.experts((f"{module}.{name}",), bias=f"{module}.{name}_bias" if mixture.biased else None)
            for name in names
        )
        return gate_up, down
    gate, up, down_ = ([f"{module}.{n}.{part}.weight" for n in range(mixture.experts)] for part in mixture.parts)
    *inner, outer = (f"{module}.{part}.bias" for part in mixture.parts)
    biases = (inner, outer) if mixture.biased else (None, None)
    return weights.experts(gate, up, bias=biases[0]), weights.experts(down_, bias=biases[1])


def _expert_tensors(shape: DecoderShape, mixture: Mixture, module: str) -> tuple[TensorSpec, ...]:
    hidden, inner = shape.hidden_size, mixture.intermediate_size
    if mixture.fused:
        return (
            *_fused_tensors(mixture, f"{module}.gate_up_proj", 2 * inner, hidden),
            *_fused_tensors(mixture, f"{module}.down_proj", hidden, inner),
        )
    sizes = list(zip(mixture.parts, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True))
    biases = [TensorSpec(f"{module}.{part}.bias", (mixture.experts, rows)) for part, (rows, _) in sizes]
    return (
        *(
            spec
            for part, (rows, columns) in sizes
            for n in range(mixture.experts)
            for spec in linear_tensors(f"{module}.{n}.{part}", rows, columns)
        ),
        *(biases if mixture.biased else ()),
    )


def _fused_tensors(mixture: Mixture, name: str, rows: int, columns: int) -> tuple[TensorSpec, ...]:
    stored = (columns, rows) if mixture.transposed else (rows, columns)
    weight = TensorSpec(name, (mixture.experts, *stored), packed=True, transposed=mixture.transposed)
    return (weight, TensorSpec(f"{name}_bias", (mixture.experts, rows))) if mixture.biased else (weight,)
