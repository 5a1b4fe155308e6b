"""The architecture `phi3`: Phi-3, Phi-3.5 and Phi-4, mini and medium."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_phi3.phi3 import Phi3

    return [Phi3]
