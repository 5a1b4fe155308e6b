"""The quantizers that come with core."""

from core import Quantizer, hookimpl


@hookimpl
def core_quantizers() -> list[type[Quantizer]]:
    from core_plugin_quant.fp16 import FP16
    from core_plugin_quant.int4 import Int4
    from core_plugin_quant.int8 import Int8
    from core_plugin_quant.stored import Stored

    return [FP16, Int8, Int4, Stored]
