"""The architecture `mistral`: Mistral 7B, Mistral Nemo and others of the same shape."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_mistral.mistral import Mistral

    return [Mistral]
