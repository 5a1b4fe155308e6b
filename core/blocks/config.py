"""Reading a model's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from core.errors import ConfigError

_SLIDING, _FULL = "sliding_attention", "full_attention"
_LARGEST_SIZE = 1 << 24


_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), bool),
    **dict.fromkeys(("sliding_window", "max_window_layers", "sliding_window_pattern", "num_key_value_heads"), int),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"), float),
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), float),
}
"""What the values of these keys are, if they are not null. Sizes are checked where they are used."""


def completed(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with what it leaves out. Raises ConfigError for a key whose value is of another kind: "8", "false"."""
    for key, kind in _KINDS.items():
        value = config.get(key)
        if value is not None and not is_of_kind(value, kind):
            raise ConfigError(f"{key} = {value!r} makes no model", "", f"it has to be of the type {kind.__name__}")
    return {**defaults, **config}


def is_of_kind(value: Any, kind: type) -> bool:
    """Whether JSON's `value` is a truth value, a whole number, or any number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def refuse_partial_rotation(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for heads that are rotated in part, in a family whose heads are always rotated as a whole."""
    given = config.get("rope_parameters") or {}
    for parameters in (config, config.get("rope_scaling") or {}, given, *given.values()):
        if isinstance(parameters, Mapping):
            refuse_unless(parameters, "partial_rotary_factor", 1.0)


def required(config: Mapping[str, Any], key: str) -> Any:
    """`config[key]`. Raises ConfigError naming the key where it is absent."""
    value = config.get(key)
    if value is None:
        raise ConfigError(f"the model's config has no {key!r}")
    return value


def size(config: Mapping[str, Any], key: str) -> int:
    """`config[key]`, a whole number above 0. Raises ConfigError where it isn't, or is more than any model has."""
    return checked_size(key, required(config, key))


def checked_size(name: str, value: Any) -> int:
    if type(value) is not int or not 0 < value <= _LARGEST_SIZE:
        raise ConfigError(f"{name} = {value!r} makes no model", "", f"whole numbers from 1 to {_LARGEST_SIZE} do")
    return value


def head_dim(config: Mapping[str, Any]) -> int:
    """The width of a head: given, or the hidden size divided among the heads."""
    return config.get("head_dim") or size(config, "hidden_size") // size(config, "num_attention_heads")


def refuse_unless(config: Mapping[str, Any], key: str, supported: Any) -> None:
    """Raises ConfigError where `config` sets `key` to something other than `supported`; null is as good as absent."""
    value = config.get(key)
    if value is not None and value != supported:
        raise ConfigError(f"{key} = {value!r} is not supported", "", f"supported: {supported!r}")


def layer_windows(
    config: Mapping[str, Any], window: int | None, slides: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Each layer's window: `window` or None, as `layer_types` says, or where it is absent, `slides` of the layer.

    Raises ConfigError for a layer of another type.
    """
    if window is None:
        return ()
    layers = size(config, "num_hidden_layers")
    types = config.get("layer_types") or [_SLIDING if slides(layer) else _FULL for layer in range(layers)]
    if len(types) != layers or not {_SLIDING, _FULL}.issuperset(types):
        raise ConfigError(f"layer_types is not {layers} times {_SLIDING} or {_FULL}", f"it is {types}")
    return tuple(window if kind == _SLIDING else None for kind in types)
