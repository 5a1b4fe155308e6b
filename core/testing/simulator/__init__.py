"""A cluster that is simulated: `simulate(Description.read(path))`. See docs/simulator.md."""

from core.testing.simulator.description import (
    COORDINATOR,
    Coordinator,
    Description,
    Event,
    Happening,
    Link,
    Load,
    Machine,
    Model,
    Wire,
)
from core.testing.simulator.load import Stream
from core.testing.simulator.report import Report
from core.testing.simulator.simulation import simulate

__all__ = [
    "COORDINATOR",
    "Coordinator",
    "Description",
    "Event",
    "Happening",
    "Link",
    "Load",
    "Machine",
    "Model",
    "Report",
    "Stream",
    "Wire",
    "simulate",
]
