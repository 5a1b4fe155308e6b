"""The architectures `qwen2_moe` (Qwen1.5 MoE, Qwen2 57B-A14B), `qwen3_moe` (Qwen3 30B-A3B, 235B-A22B), `qwen3_next`
(Qwen3-Next 80B-A3B), `qwen3_5` and `qwen3_5_moe` (the text models of Qwen3.5)."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_qwen_moe.qwen3_next import Qwen3Next, Qwen35, Qwen35Moe
    from core_plugin_qwen_moe.qwen_moe import Qwen2Moe, Qwen3Moe

    return [Qwen2Moe, Qwen3Moe, Qwen3Next, Qwen35, Qwen35Moe]
