"""The architecture `qwen3`."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_qwen3.qwen3 import Qwen3

    return [Qwen3]
