"""The guard of the seams: a plugin's mistake is named, and stays its own.

What is named: which plugin, which call, what that gave or raised, and what it should have given. A mistake is a
PluginError, which refuses one load, build or plan where it comes to light, and ends no process.
"""

from core.guard.admission import admitted
from core.guard.calls import Guard, raised
from core.guard.layers import compute_layers
from core.guard.seams import guard

__all__ = ["Guard", "admitted", "compute_layers", "guard", "raised"]
