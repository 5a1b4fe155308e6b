"""The architectures `qwen2_moe` (Qwen1.5 MoE, Qwen2 57B-A14B) and `qwen3_moe` (Qwen3 30B-A3B, 235B-A22B)."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_qwen_moe.qwen_moe import Qwen2Moe, Qwen3Moe

    return [Qwen2Moe, Qwen3Moe]
