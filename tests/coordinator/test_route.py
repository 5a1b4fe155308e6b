"""What a route keeps of batches whose sender has left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import trio
from trio.testing import wait_all_tasks_blocked

from core.coordinator.members import Member
from core.coordinator.route import Hop, Route
from core.protocol.codec import Packet
from core.protocol.messages import InferenceError, RunPrefill, Segment, Tensor

BATCH = RunPrefill(1, [Segment(1, 0, 1, 1)], Tensor("fp32", 1, 1, bytes(4)))


class Full:
    """A link on which nothing more can be sent for now."""

    async def send(self, *_: Any) -> None:
        await trio.sleep_forever()


async def test_an_answer_to_a_batch_that_was_never_sent_harms_nobody() -> None:
    member = cast(Member, SimpleNamespace(node_id="a", link=Full()))
    route = Route(1, [Hop(member, range(1))])
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(route.submit, BATCH)
            await wait_all_tasks_blocked()
            await route.take(member, Packet(InferenceError(1, "I guess what comes"), request_id="1"))
            nursery.cancel_scope.cancel()
    assert route.under_way == 0
