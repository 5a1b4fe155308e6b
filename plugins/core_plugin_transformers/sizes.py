"""What a family's layers keep for a session: found by running each without weights and without values."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor

from core import Batch, CacheSize
from core_plugin_transformers import config as configs
from core_plugin_transformers.session import Caches, States, tensors_of
from core_plugin_transformers.sharing import MadeUpBatch, Session
from core_plugin_transformers.skeleton import Skeleton

_ROWS = 4
_log = logging.getLogger(__name__)


def cache_sizes(skeleton: Skeleton) -> tuple[CacheSize, ...]:
    """Of each layer of a `skeleton` in bf16 whose layers are all left out. Consumes it."""
    caches, layers = Caches(skeleton.config, range(len(skeleton.layers))), list(skeleton.layers)
    session, states = Session(), caches.new_states() or States({})
    batch = cast(Batch, MadeUpBatch([session], _ROWS, torch.device("cpu")))
    for layer in layers:
        layer.register_forward_pre_hook(_run_without_values, with_kwargs=True)
    width = skeleton.model.get_input_embeddings().weight.shape[1]
    with torch.inference_mode():
        embeds = torch.zeros(1, _ROWS, width, dtype=skeleton.dtype)
        skeleton.run(skeleton.base, embeds, batch.positions[None], caches.of(batch, states.layers))
    own = skeleton.config.per_layer_config
    return tuple(
        _size(caches, layer, session.cached.get(layer), states.layers.get(layer), own[layer])
        for layer in range(len(layers))
    )


def _size(caches: Caches, layer: int, cached: tuple[Tensor, Tensor] | None, state: Any, config: Any) -> CacheSize:
    """Of keys and values, what its config says where its code does not get so far without values."""
    if cached is not None:
        values, rows = sum(each.shape[0] * each.shape[2] for each in cached), sum(each.shape[0] for each in cached)
    else:
        values, rows = configs.kv_width(config) if caches.attends(layer) else 0, 2
    held = list(tensors_of(state)) if state is not None else []
    in_fp32 = sum(tensor.numel() for tensor in held if tensor.dtype is torch.float32)
    in_all = sum(tensor.numel() for tensor in held)
    return CacheSize(values, caches.window(layer), in_all - in_fp32, in_fp32, rows)


def _run_without_values(stand_in: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The layer itself, which is on the meta device: as far as it gets there, which is past its cache."""
    try:
        stand_in._layer(*map(_on_meta, args), **{name: _on_meta(value) for name, value in kwargs.items()})
    # Code that looks at values, as that of experts does, raises whatever torch makes of it.
    except Exception as error:
        _log.debug("a layer ran without values until: %s", error)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    return tuple(map(_on_meta, value)) if isinstance(value, tuple) else value
