"""Reading a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError


def required(config: Mapping[str, Any], key: str) -> Any:
    """`config[key]`. Raises ConfigError naming the key where it is absent."""
    value = config.get(key)
    if value is None:
        raise ConfigError(f"the model's config has no {key!r}")
    return value


def head_dim(config: Mapping[str, Any]) -> int:
    """The width of a head: given, or the hidden size divided among the heads."""
    return int(config.get("head_dim") or required(config, "hidden_size") // required(config, "num_attention_heads"))


def refuse_unless(config: Mapping[str, Any], key: str, supported: Any) -> None:
    """Raises ConfigError where `config` sets `key` to something other than `supported`."""
    value = config.get(key, supported)
    if value != supported:
        raise ConfigError(f"{key} = {value!r} is not supported", "", f"supported: {supported!r}")
