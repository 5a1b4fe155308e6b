"""What architectures promise."""

from __future__ import annotations

from typing import Any

from core.guard.calls import Call, is_excused, raised, shown
from core.guard.layers import note_builder
from core.interfaces.architecture import ModelSpec, TensorSpec

_SIZES = ("layers", "hidden_size", "vocab_size", "context_length", "kv_width")


def check_spec(call: Call, given: Any) -> ModelSpec:
    if not isinstance(given, ModelSpec):
        raise call.gave(shown(given), "a ModelSpec")
    for name in _SIZES:
        value = getattr(given, name)
        if not isinstance(value, int) or value < 0:
            raise call.gave(f"{shown(value)} for {name}", "a whole number")
    return given


def check_tensor_specs(call: Call, given: Any) -> Any:
    if not isinstance(given, tuple | list) or not all(isinstance(spec, TensorSpec) for spec in given):
        raise call.gave(shown(given), "a tuple of TensorSpecs")
    return given


def check_layers(call: Call, given: Any) -> Any:
    if not callable(given):
        raise call.gave(shown(given), "what computes the layers")
    note_builder(call, given)
    return given


def check_embed_and_head(call: Call, given: Any) -> Any:
    """Tries them with two tokens."""
    import torch

    spec, weights = call.args
    must = f"what embeds {spec.hidden_size} values in the compute dtype, and makes {spec.vocab_size} logits in float32"
    try:
        with torch.inference_mode():
            hidden = given.embed(torch.zeros(2, dtype=torch.int64, device=weights.device))
            logits = given.logits(hidden)
    except Exception as error:
        if is_excused(error):
            raise
        raise call.gave(f"what {raised(error)}", must) from error
    for made, width, dtype in ((hidden, spec.hidden_size, weights.dtype), (logits, spec.vocab_size, torch.float32)):
        if not isinstance(made, torch.Tensor) or made.shape != (2, width) or made.dtype != dtype:
            raise call.gave(f"what makes {shown(made)} of 2 tokens", must)
    return given
