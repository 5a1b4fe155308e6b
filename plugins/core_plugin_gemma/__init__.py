"""The architectures `gemma2` and `gemma3` (text)."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_gemma.gemma import Gemma2, Gemma3

    return [Gemma2, Gemma3]
