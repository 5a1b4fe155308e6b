"""The architecture `qwen2`: Qwen2, Qwen2.5 and others of the same shape."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_qwen2.qwen2 import Qwen2

    return [Qwen2]
