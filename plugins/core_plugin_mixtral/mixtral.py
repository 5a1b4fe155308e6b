"""How a mixtral config reads."""

from collections.abc import Mapping
from typing import Any, ClassVar

from core.blocks import DecoderArchitecture, DecoderShape, Mixture, layer_windows, refuse_unless, required


class Mixtral(DecoderArchitecture):
    """As mistral, with experts in the place of MLPs; without a window where the config has none."""

    name = "mixtral"
    model_types = ("mixtral",)
    defaults: ClassVar[Mapping[str, Any]] = {"rope_theta": 1_000_000.0}

    def shape(self, config: Mapping[str, Any]) -> DecoderShape:
        refuse_unless(config, "hidden_act", "silu")
        window = config.get("sliding_window")
        return DecoderShape.from_config(
            config,
            norm_eps=config.get("rms_norm_eps", 1e-5),
            windows=layer_windows({**config, "layer_types": None}, window, lambda layer: True),
            mixture=Mixture.from_config(
                config,
                intermediate_size=required(config, "intermediate_size"),
                normalised=True,
                block="block_sparse_moe",
                parts=("w1", "w3", "w2"),
            ),
        )
