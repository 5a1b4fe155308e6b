"""What a node is told on its command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from core.interfaces.transport import DEFAULT_TRANSPORT
from core.trust.cluster import Membership


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """`max_memory` in bytes, None for what the device has free. `threads` None leaves one core to the event loop.

    It compiles its layers where it `compiles`.
    `peer_host`: where the neighbour's link is awaited; None is the address at which the coordinator is reached.
    `labels` are its owner's words for it, which planners may heed.
    `local_token` is what a coordinator gave it that started it as a process of its own machine.
    `transport` None: that of the membership.
    `membership` None: the coordinator is on this machine, at `cluster_host` and `cluster_port`, and asks for nothing.
    """

    node_id: str
    membership: Membership | None = None
    cluster_host: str = "127.0.0.1"
    cluster_port: int = 7001
    device: str = "auto"
    hf_cache_dir: Path | None = None
    max_memory: int | None = None
    threads: int | None = None
    compiles: bool = False
    peer_host: str | None = None
    local_token: bytes | None = None
    labels: tuple[str, ...] = ()
    transport: str | None = None

    @property
    def reached_by(self) -> str:
        """The name of the transport: what was said, or what the coordinator is known to be reached by."""
        if self.transport is not None:
            return self.transport
        return self.membership.cluster.transport if self.membership else DEFAULT_TRANSPORT
