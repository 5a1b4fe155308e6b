"""A session: one generation on one route, from the prompt's prefill to its last token."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from core.coordinator.head import Decoding, Head, Step
from core.coordinator.route import Route, Ticket
from core.interfaces.engine import Delta, TokenLogprob
from core.protocol.messages import HiddenState, RunDecode, RunPrefill, Segment, Tensor
from core.runtime.compute import ComputeThread

PREFILL_ROWS = 512
"""Rows of one prefill chunk: others' decode steps pass between two chunks."""
MOST_CHUNKS_UNDER_WAY = 8
"""Of one session: a node's inbox holds those of all sessions."""


class Session:
    """The Generation of core.interfaces.engine. `on_token` is called for every decoded token."""

    def __init__(
        self,
        session_id: int,
        prompt: Sequence[int],
        decoding: Decoding,
        route: Route,
        head: Head,
        compute: ComputeThread,
        on_token: Callable[[], None],
    ) -> None:
        self.prompt_tokens = len(prompt)
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._id = session_id
        self._prompt = prompt
        self._decoding = decoding
        self._route = route
        self._head = head
        self._compute = compute
        self._on_token = on_token
        self._begun = False

    async def __aiter__(self) -> AsyncIterator[Delta]:
        answer = await self._prefill()
        position = len(self._prompt)
        while True:
            step, ticket = await self._compute.run(self._step, answer.hidden, position)
            self._on_token()
            if step.hidden is not None and ticket is None:
                ticket = await self._route.submit(self._decode(step.hidden, position))
            yield step.delta
            if ticket is None:
                return
            answer = await self._route.answer(ticket)
            position += 1

    def _step(self, hidden: Tensor, position: int) -> tuple[Step, Ticket | None]:
        """In the compute thread, which sends the next step on its way itself where it can."""
        step = self._head.step(hidden, self._decoding)
        if step.hidden is None:
            return step, None
        return step, self._route.submit_now(self._decode(step.hidden, position))

    def _decode(self, hidden: Tensor, position: int) -> RunDecode:
        return RunDecode(self._route.epoch, [Segment(self._id, position, rows=1, outputs=1)], hidden)

    async def _prefill(self) -> HiddenState:
        """Chunks follow each other through the stages, so that every stage has one to work on."""
        under_way: deque[Ticket] = deque()
        for start in range(0, len(self._prompt), PREFILL_ROWS):
            if len(under_way) > min(len(self._route.hops), MOST_CHUNKS_UNDER_WAY):
                await self._route.answer(under_way.popleft())
            chunk = self._prompt[start : start + PREFILL_ROWS]
            is_last = start + len(chunk) == len(self._prompt)
            segment = Segment(self._id, start, rows=len(chunk), outputs=1 if is_last else 0)
            hidden = await self._compute.run(self._head.embed, chunk)
            self._begun = True
            under_way.append(await self._route.submit(RunPrefill(self._route.epoch, [segment], hidden)))
        for ticket in under_way:
            answer = await self._route.answer(ticket)
        return answer

    async def free(self) -> None:
        """Frees the session's caches on every hop, where there are any."""
        if self._begun:
            await self._route.clear([self._id])
