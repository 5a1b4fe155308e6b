"""What the compute thread sends by itself never passes what waits to be handed on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import StageError
from core.node.batches import Done, HandOver, obey, run_batch
from core.protocol.fields import Segment
from core.protocol.messages import ClearCache, CopyCache, RunDecode
from core.protocol.tensors import to_wire


class Caches:
    def clear(self, sessions: Any) -> None:
        return

    def copy(self, source: int, target: int, length: int) -> None:
        raise StageError("there is no room")


STAGE: Any = SimpleNamespace(run=lambda hidden, segments, outputs_only: hidden, caches=Caches())


def decoded(hand_over: HandOver) -> Done:
    batch = RunDecode(1, [Segment(1, 0, 1, 1)], to_wire(torch.zeros(1, 4), torch.float32))
    assignment: Any = SimpleNamespace(hop=1, next_hop=2)
    link: Any = SimpleNamespace(send_now=lambda message, request_id: True)
    return run_batch(STAGE, batch, 0, torch.float32, assignment, link, "a", hand_over)


def test_a_decode_step_waits_behind_a_cache_command_and_then_goes_by_itself() -> None:
    hand_over = HandOver()
    assert decoded(hand_over).sent
    obey(STAGE, ClearCache(1, [9]), hand_over)
    assert not decoded(hand_over).sent
    hand_over.handed += 1
    assert not decoded(hand_over).sent, "the step before is not handed on yet"
    hand_over.handed += 2
    assert decoded(hand_over).sent


def test_a_command_that_fails_here_is_waited_for_too() -> None:
    """The hops behind it get it all the same."""
    hand_over = HandOver()
    with pytest.raises(StageError):
        obey(STAGE, CopyCache(1, 2, 3, 4), hand_over)
    assert not decoded(hand_over).sent
