"""House rules: loopback and port 0 alone, a fake engine, every wait within `trio.fail_after`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import trio

from core.errors import ConfigError, NotReady, RequestError
from core.gateway.server import serve_http
from core.gateway.settings import ApiSettings
from core.interfaces.engine import (
    ClusterStatus,
    Conversation,
    Delta,
    GenerationRequest,
    ModelCard,
    NodeStatus,
    TokenLogprob,
    WhatIf,
)
from core.interfaces.membership import AskerEntry, InviteEntry, MemberEntry, MembershipStatus, NewInvite
from core.interfaces.planner import StagePlan
from core.interfaces.telemetry import History, HistoryPoint, Metric, Pace, PaceStatus, Sample, SessionStatus
from core.runtime.prompt_template import PromptTemplate


def deltas(*texts: str) -> list[Delta]:
    last = len(texts)
    return [Delta(text, i, "stop" if i == last else None) for i, text in enumerate(texts, 1)]


@dataclass
class FakeEngine:
    """Plays `script`, whatever is asked: deltas are given, errors raised, events waited for.

    Then, where `endless` is a text, it gives that on and on.
    """

    script: list[Delta | BaseException | trio.Event] = field(default_factory=lambda: deltas("Hello", "", " world"))
    refusal: BaseException | None = None
    gate: trio.Event | None = None
    endless: str = ""
    served_model: str = "org/tiny"
    created: int = 1_700_000_000
    state: str = "ready"
    left_out: dict[str, str] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    chat_template: str | None = ""
    tool_template: str | None = None
    opened: str = ""

    waits_for: str = ""
    membership: FakeMembership = field(default_factory=lambda: FakeMembership())

    requests: list[GenerationRequest] = field(default_factory=list)
    given: int = 0
    rebalanced: int = 0
    most: int = 0
    sessions: int = 0
    changed: trio.Condition = field(default_factory=trio.Condition)

    def status(self) -> ClusterStatus:
        node = NodeStatus("n1", "host", "cpu", "serving", (0, 4), 10, 20, 30, self.sessions, 40, "direct", "", None)
        return ClusterStatus(
            model=self.served_model,
            state=self.state,
            detail="waiting for two nodes",
            progress=None,
            required_nodes=3,
            ready_nodes=1,
            route_epoch=1,
            layers=4,
            sessions=self.sessions,
            tokens_per_second=1.5,
            quant="none",
            dtype="fp32",
            wire_dtype="fp32",
            quality="as the checkpoint",
            nodes=(node,),
            left_out=self.left_out,
        )

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Any]:
        self.requests.append(request)
        if self.refusal:
            raise self.refusal
        await self._count(1)
        try:
            if self.gate is not None:
                await self.gate.wait()
            async with trio.open_nursery():  # an error inside comes out in a group, as a real engine's may
                yield FakeGeneration(self, self.prompt_logprobs)
        finally:
            with trio.CancelScope(shield=True):
                await self._count(-1)

    def history(self) -> History:
        return History(10, (HistoryPoint(1_700_000_000, 42, 2),))

    async def what_if(self, without: Sequence[str], newcomers: Sequence[int]) -> WhatIf:
        if "nobody" in without:
            raise RequestError("there is no node 'nobody'", param="without")
        return WhatIf(f"without {len(without)}, with {sum(newcomers)} bytes", (StagePlan("n1", 0, 4, 9),))

    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric("core_tokens", "counter", "Tokens.", (Sample(7),)),
            Metric("core_by_node", "gauge", "By node.", (Sample(1.5, (("node", 'a"b'),)), Sample(2, (("node", "c"),)))),
            Metric("core_ttft_seconds", "histogram", "TTFT.", (Sample(2.5, buckets=((0.1, 1), (math.inf, 3))),)),
        )

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Any]:
        if self.state != "ready":
            raise NotReady("the model is not open", required=3, ready=1)
        yield self._watched()

    async def _watched(self) -> AsyncIterator[SessionStatus | PaceStatus]:
        yield SessionStatus(1, "prefill", 1, 100, 20, 60, 0, 0.0, 0, 0, 0.5)
        yield SessionStatus(1, "suspended", 1, 100, 20, 60, 0, 0.0, 0, 0, 0.7, "node 'n2' was lost", 1)
        yield SessionStatus(1, "failed", 1, 100, 20, 100, 3, 9.5, 0, 0, 0.9, "node 'n1' was lost", 1)
        yield PaceStatus("n2", Pace.SLOWER, 0.084, 0.06)

    def card(self) -> ModelCard:
        if self.state != "ready":
            raise NotReady("the model is not open", required=3, ready=1)
        plain, for_tools = (
            None if source is None else PromptTemplate(source).facts()
            for source in (self.chat_template, self.tool_template or self.chat_template)
        )
        return ModelCard(self.served_model, self.created, 4096, 256, plain, for_tools)

    async def rebalance(self) -> str:
        self.card()
        self.rebalanced += 1
        return "plan 2 is being loaded"

    async def tokenize(self, prompt: str | Conversation, client: str = "") -> tuple[int, ...]:
        """A token is a byte."""
        if isinstance(prompt, str):
            return tuple(prompt.encode())
        return tuple("".join(message["content"] for message in prompt.messages).encode())

    async def prompt_end(self, conversation: Conversation, client: str = "") -> str:
        """As the template of a model that thinks may end it, which is told not to by an option or a message."""
        thinks = conversation.template_options.get("enable_thinking", True)
        silenced = any("/no_think" in message["content"] for message in conversation.messages)
        return self.opened if thinks and not silenced else "<think>\n\n</think>\n\n"

    async def detokenize(self, tokens: tuple[int, ...], client: str = "") -> str:
        if any(token > 255 for token in tokens):
            raise RequestError("a token is unknown", param="tokens")
        return bytes(tokens).decode(errors="replace")

    async def _count(self, step: int) -> None:
        async with self.changed:
            self.sessions += step
            self.most = max(self.most, self.sessions)
            self.changed.notify_all()

    async def until(self, predicate: Callable[[FakeEngine], bool]) -> None:
        async with self.changed:
            while not predicate(self):
                await self.changed.wait()


class FakeMembership:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    async def status(self) -> MembershipStatus:
        return MembershipStatus(
            "",
            (MemberEntry("desk-abcdefgh", True, 1_700_000_000, 1_700_000_100, 321),),
            (AskerEntry("123456", "<b>laptop</b>", "192.168.1.7", 1_900_000_000),),
            (InviteEntry("a1b2c3", "open", 1_700_000_000, 1_900_000_000, "anna", ""),),
        )

    async def invite(self, seconds: int, name: str) -> NewInvite:
        self.asked.append(("invite", str(seconds), name))
        return NewInvite("a1b2c3", "core://join/abc", 1_900_000_000, ("192.168.1.2",), 7001)

    async def revoke(self, id: str) -> str:
        self.asked.append(("revoke", id))
        return id

    async def approve(self, code: str) -> str:
        if code != "123456":
            raise ConfigError(f"no machine asks to join with the code {code!r}")
        self.asked.append(("approve", code))
        return "laptop-abcdefgh"

    async def deny(self, code: str) -> str:
        self.asked.append(("deny", code))
        return "laptop"

    async def remove(self, name: str) -> str:
        self.asked.append(("remove", name))
        return name


class FakeGeneration:
    prompt_tokens = 5
    cached_tokens = 2

    @property
    def waits_for(self) -> str:
        return self._engine.waits_for

    def __init__(self, engine: FakeEngine, prompt_logprobs: tuple[TokenLogprob, ...]) -> None:
        self._engine = engine
        self.prompt_logprobs = prompt_logprobs

    async def __aiter__(self) -> AsyncIterator[Delta]:
        engine = self._engine
        for step in engine.script:
            match step:
                case trio.Event():
                    await step.wait()
                case BaseException():
                    raise step
                case _:
                    await trio.lowlevel.checkpoint()
                    yield step
        while engine.endless:
            async with engine.changed:
                engine.given += 1
                engine.changed.notify_all()
            yield Delta(engine.endless, engine.given)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings()


@pytest.fixture
async def address(engine: FakeEngine, settings: ApiSettings, nursery: trio.Nursery) -> tuple[str, int]:
    with trio.fail_after(300):
        return await nursery.start(serve_http, engine, "127.0.0.1", 0, settings)


@pytest.fixture
async def client(address: tuple[str, int]) -> AsyncIterator[httpx.AsyncClient]:
    with trio.fail_after(300):
        async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", timeout=300) as client:
            yield client
