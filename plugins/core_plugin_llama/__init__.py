"""The architecture `llama`: Llama 2 and 3.x, SmolLM2, TinyLlama and others of the same shape."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_llama.llama import Llama

    return [Llama]
