"""How a phi3 config reads."""

from collections.abc import Mapping
from typing import Any

from core.blocks import DecoderArchitecture, DecoderShape, layer_windows, refuse_unless


class Phi3(DecoderArchitecture):
    """q, k and v are one tensor, and so are gate and up. A part of each head may be left unrotated."""

    name = "phi3"
    model_types = ("phi3",)

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        return DecoderShape.from_config(
            config,
            norm_eps=config.get("rms_norm_eps", 1e-5),
            fused_tensors=True,
            windows=layer_windows(config, config.get("sliding_window"), lambda layer: True),
        )
