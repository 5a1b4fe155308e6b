"""The quantizers that come with core."""

from core import Quantizer, hookimpl


@hookimpl
def core_quantizers() -> list[type[Quantizer]]:
    from core_plugin_quant.fp16 import FP16

    return [FP16]
