"""What every plugin of a kind must do, as tests: an author subclasses the contract and gives it the plugin."""

from core.testing.contracts.architecture import ArchitectureContract
from core.testing.contracts.planner import PlannerContract
from core.testing.contracts.transport import HOST, TransportContract, echo, listening

__all__ = ["ArchitectureContract", "HOST", "PlannerContract", "TransportContract", "echo", "listening"]
