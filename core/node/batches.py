"""What the compute thread does for a hop: runs its batches, obeys its cache commands, and sends on what it can."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import torch

from core.errors import StageError
from core.link import Link
from core.protocol.fields import MAX_STAGES
from core.protocol.messages import (
    Assignment,
    CacheCommand,
    ClearCache,
    CopyCache,
    HiddenState,
    Message,
    Run,
    RunDecode,
)
from core.protocol.tensors import from_wire, to_wire
from core.runtime.stage import Stage


@dataclass(frozen=True, slots=True)
class Done:
    """What is to go on to the next hop or the coordinator, and whether it was sent from here."""

    message: Message
    sent: bool = False
    seconds: float = 0.0
    """How long a batch was computed."""


@dataclass(slots=True)
class HandOver:
    """How much the compute thread has `left` to trio to hand on, and how much of that is `handed` on. Each writes its
    own. While they differ, nothing may be sent past trio: batches and cache commands keep their order."""

    left: int = 0
    handed: int = 0


def run_batch(
    stage: Stage,
    batch: Run,
    came: int,
    wire: torch.dtype,
    assignment: Assignment,
    link: Link,
    request_id: str,
    hand_over: HandOver,
) -> Done:
    """`came` is when the batch did, by time.perf_counter_ns. Raises StageError where it can't be computed."""
    if max(len(batch.queue_us), len(batch.compute_us)) >= MAX_STAGES:
        raise StageError("a batch has passed more stages than there can be", f"{MAX_STAGES} at most")
    last = assignment.next_hop is None
    started = time.perf_counter_ns()
    queue_us = [*batch.queue_us, (started - came) // 1000]
    result = stage.run(from_wire(batch.hidden), batch.segments, outputs_only=last)
    hidden = to_wire(result, wire)
    took = time.perf_counter_ns() - started
    compute_us = [*batch.compute_us, took // 1000]
    message: Message
    if assignment.next_hop is None:
        message = HiddenState(assignment.hop, hidden, compute_us, queue_us)
    else:
        message = msgspec.structs.replace(
            batch, hop=assignment.next_hop, hidden=hidden, compute_us=compute_us, queue_us=queue_us
        )
    # A prompt's chunks keep their order: one that is too large to be sent here must not be overtaken by the next.
    in_turn = (last or isinstance(batch, RunDecode)) and hand_over.left == hand_over.handed
    sent = in_turn and link.send_now(message, request_id)
    hand_over.left += not sent
    return Done(message, sent, took / 1e9)


def obey(stage: Stage, command: CacheCommand, hand_over: HandOver) -> Done:
    """It is handed on whatever becomes of it here: the hops behind have caches of their own."""
    hand_over.left += 1
    if isinstance(command, CopyCache):
        stage.caches.copy(command.source, command.target, command.length)
    elif isinstance(command, ClearCache):
        stage.caches.clear(command.sessions)
    return Done(command)


def rows_of(message: Message) -> int:
    """Tokens that a message moves through the layers."""
    return sum(segment.rows for segment in message.segments) if isinstance(message, Run) else 0


def bytes_of(message: Message) -> int:
    """Of the hidden states in it."""
    return len(message.hidden.data) if isinstance(message, Run) else 0
