"""What the coordinator is told on its command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.interfaces.checkpoint import Source
from core.interfaces.dtypes import DType, KVDType
from core.interfaces.planner import PlanFor
from core.interfaces.transport import DEFAULT_TRANSPORT


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """`max_nodes` None: no bound. `target_node_memory` (bytes) stands in for a node that can't tell its memory.

    `quant` "auto", `dtype` None and `wire_dtype` "auto": what suits the checkpoint and this machine's device.
    `keep_head`: embedding and head are not quantized.
    `max_sessions` run at once, others wait; `max_context` (tokens) None: as much as the model and the nodes' memory
    allow. `prefix_cache`: ended sessions' caches stay for prompts that begin alike, of the same client, or with
    `share_prefixes` of anybody.
    No option sets how many tokens are taken at a time: `answer_tokens` of KV memory are reserved for an answer that
    nobody bounded, and the chunks of a prompt have `min_chunk` to `max_chunk`.
    `local_nodes` are started beside the coordinator, and share this machine's memory among them; they compile their
    layers where it `compiles`. `state_dir` None: the
    system's place for it. `advertise`: hosts for invites, none for this machine's own addresses.
    `plan_for`, and `pins` by node, are what planners are asked for; `planned_context` (tokens) is what a plan sets
    aside in each layer, None: 4096, or as many as may come. The nodes that are `excluded` get no layers, and no more of
    a node's memory is filled than `node_memory` (bytes) says.
    `recovery_time`: seconds for which a generation whose route ended waits for the next one; 0 ends it at once.
    `rebalance`: a plan that is predicted to be better takes the serving one's place. `standby`: nodes without layers
    hold those in memory that the loss of another node would need.
    `chat_template`: Jinja source, in place of the model's own.
    `announce`: who is on the local network may find the cluster, where nodes can join from beyond this machine.
    """

    source: Source
    served_model_name: str
    node_host: str = "127.0.0.1"
    node_port: int = 7001
    min_nodes: int = 1
    max_nodes: int | None = None
    local_nodes: int = 0
    quant: str = "auto"
    keep_head: bool = False
    dtype: DType | None = None
    wire_dtype: str = "auto"
    kv_dtype: KVDType = KVDType.AUTO
    device: str = "auto"
    threads: int | None = None
    compiles: bool = False
    target_node_memory: int | None = None
    max_sessions: int = 64
    max_context: int | None = None
    prefix_cache: bool = True
    share_prefixes: bool = False
    speculation: bool = True
    answer_tokens: int = 1024
    min_chunk: int = 16
    max_chunk: int = 512
    transport: str = DEFAULT_TRANSPORT
    planner: str = "measured"
    plan_for: PlanFor = PlanFor.LATENCY
    planned_context: int | None = None
    pins: Mapping[str, range] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    node_memory: Mapping[str, int] = field(default_factory=dict)
    state_dir: Path | None = None
    advertise: tuple[str, ...] = ()
    announce: bool = False
    recovery_time: float = 120.0
    rebalance: bool = True
    standby: bool = False
    chat_template: str | None = None
