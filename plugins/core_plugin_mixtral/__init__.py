"""The architecture `mixtral`: Mixtral 8x7B, 8x22B and others of the same shape."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_mixtral.mixtral import Mixtral

    return [Mixtral]
