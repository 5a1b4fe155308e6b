"""What a mixture of experts is built from: how its experts are chosen, and how a checkpoint names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

from torch import Tensor

from core.blocks.config import checked_size, required, size
from core.errors import ConfigError


class Scoring(StrEnum):
    """What makes an expert's score of its logit."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Mixture:
    """How one family's mixtures read: sizes in values."""

    experts: int
    chosen: int
    """How many experts a token goes to: those with the highest scores."""
    intermediate_size: int
    scoring: Scoring = Scoring.SOFTMAX
    normalised: bool = False
    """The scores of a token's experts, which weight their results, are made to add up to 1."""
    scale: float = 1.0
    """What these weights are multiplied by in the end."""
    corrected: bool = False
    """A bias for each expert is added to its score when experts are chosen, but not when they are weighted."""
    groups: int = 1
    groups_chosen: int = 1
    """Experts are in so many groups, and a token's are from the so many best of them."""
    group_leaders: int = 2
    """A group is as good as so many of its best experts together."""
    shared_size: int = 0
    """The intermediate size of what every token goes to besides; 0 is none."""
    shared_gate: bool = False
    """A gate says how much of it each token takes."""
    dense_layers: frozenset[int] = frozenset()
    """The layers with an MLP in the place of experts."""
    gate: Callable[[Tensor], Tensor] | None = None
    """What makes an expert's inner values of its first product, [rows, 2 * intermediate_size]; None is as in an MLP."""
    block: str = "mlp"
    router: str = "gate"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The names of an expert's gate, up and down."""
    shared: str = "shared_experts"
    fused: bool = False
    """All experts of a layer are one tensor in the checkpoint, and gate and up are."""
    transposed: bool = False
    """Fused experts are stored as [experts, in_features, out_features]."""
    biased: bool = False
    """Router and experts have biases; those of experts are a tensor [experts, out_features] for each part."""

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that no mixture has."""
        for name in ("experts", "chosen", "intermediate_size", "groups", "groups_chosen"):
            checked_size(name, getattr(self, name))
        in_group = self.experts // self.groups
        if self.groups * in_group != self.experts or not self.chosen <= self.groups_chosen * in_group <= self.experts:
            raise ConfigError(
                f"{self.chosen} of {self.experts} experts can't be chosen",
                f"from {self.groups_chosen} of {self.groups} groups",
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **differences: Any) -> Self:
        """The sizes by the names that configs have for them, and in what the family differs. Raises ConfigError."""
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        usual: dict[str, Any] = {
            "experts": next((config[name] for name in names if config.get(name) is not None), None),
            "chosen": required(config, "num_experts_per_tok"),
        }
        if "intermediate_size" not in differences:
            usual["intermediate_size"] = required(config, "moe_intermediate_size")
        return cls(**{**usual, **differences})

    def as_fused(self) -> Mixture:
        """The same as transformers saves its own fused tensors."""
        return replace(self, fused=True, block="mlp")


def first_layers(config: Mapping[str, Any], count: int) -> frozenset[int]:
    """The model's first `count` layers, or all of them where it has fewer."""
    return frozenset(range(min(count, size(config, "num_hidden_layers"))))
