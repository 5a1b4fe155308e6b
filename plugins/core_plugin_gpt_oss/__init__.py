"""The architecture `gpt_oss`: gpt-oss 20b and 120b, from checkpoints in 16 bits."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_gpt_oss.gpt_oss import GptOss

    return [GptOss]
