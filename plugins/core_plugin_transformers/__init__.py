"""The architecture `transformers`: decoder-only models of any family that the transformers library computes."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_transformers.architecture import Transformers

    return [Transformers]
