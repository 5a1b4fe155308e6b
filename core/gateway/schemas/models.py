"""`/v1/models`, `/health` and `/v1/cluster/rebalance`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Model(Struct, kw_only=True):
    """The model that the cluster serves.

    `max_model_len` is what prompt and answer may have together here, in tokens; null until the model is open.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["core"] = "core"
    max_model_len: int | None


class Models(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(Struct):
    status: Literal["ok"] = "ok"


class Waiting(Struct):
    """`status` is waiting or loading; `detail` says what the cluster waits for."""

    status: str
    detail: str
    required_nodes: int
    ready_nodes: int


class Rebalancing(Struct):
    """`message` says what becomes of it."""

    message: str
