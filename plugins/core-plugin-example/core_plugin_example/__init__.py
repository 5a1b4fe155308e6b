"""A quantizer that stores weights in bfloat16."""

from core import Quantizer, hookimpl

CORE_API_VERSION = 1


@hookimpl
def core_quantizers() -> list[type[Quantizer]]:
    from core_plugin_example.bf16 import BF16

    return [BF16]
