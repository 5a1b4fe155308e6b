"""The architecture `qwen3_moe`: Qwen3 30B-A3B, 235B-A22B and others of the same shape."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_qwen_moe.qwen_moe import Qwen3Moe

    return [Qwen3Moe]
