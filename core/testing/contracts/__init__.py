"""What every plugin of a kind must do, as tests: an author subclasses the contract and gives it the plugin."""

import pytest

pytest.register_assert_rewrite(
    *(f"{__name__}.{kind}" for kind in ("architecture", "checkpoint", "planner", "quantizer", "transport"))
)

from core.testing.contracts.architecture import ArchitectureContract, HeldLayersContract
from core.testing.contracts.checkpoint import CheckpointFormatContract
from core.testing.contracts.planner import PlannerContract
from core.testing.contracts.quantizer import QuantizerContract
from core.testing.contracts.transport import HOST, TransportContract, echo, listening

__all__ = [
    "ArchitectureContract",
    "CheckpointFormatContract",
    "HOST",
    "HeldLayersContract",
    "PlannerContract",
    "QuantizerContract",
    "TransportContract",
    "echo",
    "listening",
]
