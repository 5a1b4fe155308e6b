"""The architectures `deepseek_v2` (DeepSeek V2, V2-Lite, V2.5) and `deepseek_v3` (DeepSeek V3, R1, V3.1)."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_deepseek.deepseek import DeepseekV2, DeepseekV3

    return [DeepseekV2, DeepseekV3]
