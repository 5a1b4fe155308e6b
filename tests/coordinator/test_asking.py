"""A machine without an invite asks to join: approved, denied, not answered, turned away, and impersonated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from core.coordinator import join_requests
from core.coordinator.join_requests import MAX_BEGUN_PER_ADDRESS, MAX_PER_ADDRESS, MAX_WAITING
from core.errors import ConfigError, TrustError
from core.link import Link, first_message, open_link
from core.node.agent import run_node
from core.node.settings import NodeSettings
from core.node.state import Activity, Duty
from core.protocol.messages import PROTOCOL_VERSION, Asking, Challenge, Error, Hello, Message, Reveal
from core.testing.cluster_in_memory import (
    HERE,
    POLL_SECONDS,
    Machine,
    MemoryCluster,
    open_to_friends,
    plugins_on,
)
from core.testing.transport import MemoryTransport
from core.trust.asking import code, commitment
from core.trust.cluster import Cluster, Membership
from core.trust.identity import Identity
from core.trust.proof import new_nonce, signature
from core.trust.register import Asker, Register
from core.trust.state_dir import StateDir

SECONDS = 300
FRIEND = "192.168.1.9"


class Friend:
    """A node that asks. `run` it; `shown` is what it says meanwhile."""

    def __init__(self, cluster: MemoryCluster, state: StateDir, fingerprint: bytes, host: str = FRIEND) -> None:
        self.machine = Machine(cluster.network, host)
        self.state = StateDir.open(state.path.parent / "friend")
        self.membership = Membership.ask(Cluster((HERE,), cluster.coordinator.node_port, fingerprint), self.state)
        self.duty = Duty()
        self.shown: list[str] = []
        self.activity = Activity(on_change=lambda now: self.shown.append(f"{now.state}: {now.detail}"))

    async def run(self) -> None:
        settings = NodeSettings("anna", self.membership, device="cpu", threads=1, transport=Machine.name)
        await run_node(settings, plugins_on(self.machine), self.activity, self.duty)

    async def until_shown(self, text: str) -> str:
        while True:
            for line in self.shown:
                if text in line:
                    return line
            await trio.sleep(POLL_SECONDS)

    @property
    def code(self) -> str:
        (line,) = [line for line in self.shown if line.startswith("asking")]
        return line.partition("code: ")[2][:6]


async def asked(state: StateDir, number: int = 1) -> list[Asker]:
    while True:
        askers = Register(state).read().asking
        if len(askers) == number:
            return askers
        await trio.sleep(POLL_SECONDS)


def fingerprint(state: StateDir) -> bytes:
    return Identity.open(state).fingerprint


async def test_a_friend_whom_the_host_approves_joins_at_once_and_stays_a_member(
    model: Path, state: StateDir, prompt: tuple[int, ...]
) -> None:
    async with open_to_friends(model, state) as cluster, trio.open_nursery() as nursery:
        anna = Friend(cluster, state, fingerprint(state))
        nursery.start_soon(anna.run)
        await anna.until_shown("asking")
        (asker,) = await asked(state)
        assert (asker.code, asker.name, asker.host) == (anna.code, "anna", FRIEND)
        assert cluster.coordinator.status().nodes == ()
        with pytest.raises(ConfigError, match="no machine asks"):
            Register(state).approve(f"{(int(anna.code) + 1) % 10**6:06}")
        node = Register(state).approve(f"{anna.code[:3]} {anna.code[3:]}")
        await cluster.ready()
        assert await cluster.text(prompt, 4)
        assert cluster.coordinator.status().nodes[0].node_id == node.node_id
        assert Register(state).read().asking == []
        nursery.cancel_scope.cancel()
        remembered = Membership.remembered(anna.state)
        assert remembered is not None
        assert not remembered.cluster.asks


async def test_a_known_machine_that_asks_is_let_in_without_a_question(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster, trio.open_nursery() as nursery:
        anna = Friend(cluster, state, fingerprint(state))
        register = Register(state)
        register.ask(Asker("123456", "anna", anna.membership.identity.fingerprint.hex(), FRIEND, 2**33))
        register.approve("123456")
        nursery.start_soon(anna.run)
        await cluster.ready()
        assert not [line for line in anna.shown if line.startswith("asking")]
        nursery.cancel_scope.cancel()


async def test_a_friend_who_is_denied_is_told_and_forgets_the_cluster(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster, trio.open_nursery() as nursery:
        anna = Friend(cluster, state, fingerprint(state))

        async def deny() -> None:
            (asker,) = await asked(state)
            Register(state).deny(asker.code)

        nursery.start_soon(deny)
        with pytest.raises(TrustError, match="does not let this machine in"):
            await anna.run()
        assert Register(state).read().nodes == []
        assert Membership.remembered(anna.state) is None


async def test_a_host_who_says_nothing_has_said_no(
    model: Path, state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_requests, "ASK_SECONDS", 0.1)
    async with open_to_friends(model, state) as cluster:
        anna = Friend(cluster, state, fingerprint(state))
        with pytest.raises(TrustError, match="did not answer within"):
            await anna.run()
        assert Register(state).read().asking == []


async def test_who_leaves_asks_no_more(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster:
        anna = Friend(cluster, state, fingerprint(state))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(anna.run)
            (asker,) = await asked(state)
            anna.duty.leave("its user quit")
        await asked(state, 0)
        with pytest.raises(ConfigError, match="no machine asks"):
            Register(state).approve(asker.code)


async def test_another_certificate_than_the_announced_one_is_asked_nothing(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster, trio.open_nursery() as nursery:
        anna = Friend(cluster, state, bytes(32))
        nursery.start_soon(anna.run)
        await anna.until_shown("another certificate")
        assert anna.machine.sent == []
        assert Register(state).read().asking == []
        nursery.cancel_scope.cancel()


class Asks:
    """One who asks by hand, from `origin`."""

    def __init__(self, network: MemoryTransport, port: int, listener: bytes, origin: str) -> None:
        self._dial: Callable[[], Any] = lambda: network.dial(HERE, port, timeout=1, pin=listener, origin=origin)
        self._listener = listener
        self.identity = Identity.fresh()
        self.nonce = new_nonce()

    @asynccontextmanager
    async def hello(self, **changed: Any) -> AsyncIterator[tuple[Link, Message]]:
        async with self._dial() as channel, open_link(channel) as link:
            challenge = await first_message(link)
            assert isinstance(challenge, Challenge)
            proof = signature(self.identity, "node", challenge.nonce, self._listener)
            hello = {"certificate": self.identity.certificate, "signature": proof, "asks": commitment(self.nonce)}
            await link.send(Hello(PROTOCOL_VERSION, "[2Jx y", **{**hello, **changed}))
            yield link, await first_message(link)

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[Link]:
        async with self.hello() as (link, answer):
            assert isinstance(answer, Asking), answer
            await link.send(Reveal(self.nonce))
            yield link


async def test_so_many_ask_and_no_more(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster, AsyncExitStack() as stack:
        port, listener = cluster.coordinator.node_port, fingerprint(state)

        def asks(number: int) -> Asks:
            return Asks(cluster.network, port, listener, f"192.168.2.{number}")

        for _ in range(MAX_PER_ADDRESS):
            await stack.enter_async_context(asks(1).waiting())
        async with asks(1).hello() as (_, answer):
            assert isinstance(answer, Error)
            assert "asked too often" in answer.message
        for number in range(2, 2 + MAX_WAITING - MAX_PER_ADDRESS):
            await stack.enter_async_context(asks(number).waiting())
        async with asks(99).hello() as (_, answer):
            assert isinstance(answer, Error)
            assert "too many machines ask" in answer.message
        askers = await asked(state, MAX_WAITING)
        assert {asker.name for asker in askers} == {"2Jx-y"}


async def test_who_asks_again_and_again_is_turned_away(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster:
        port, listener = cluster.coordinator.node_port, fingerprint(state)
        for _ in range(MAX_BEGUN_PER_ADDRESS):
            async with Asks(cluster.network, port, listener, FRIEND).waiting():
                await asked(state)
            await asked(state, 0)
        async with Asks(cluster.network, port, listener, FRIEND).hello() as (_, answer):
            assert isinstance(answer, Error)
            assert "asked too often" in answer.message


async def test_a_nonce_that_was_chosen_afterwards_is_refused(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster:
        asks = Asks(cluster.network, cluster.coordinator.node_port, fingerprint(state), FRIEND)
        async with asks.hello() as (link, answer):
            assert isinstance(answer, Asking)
            await link.send(Reveal(new_nonce()))
            refusal = await first_message(link)
        assert isinstance(refusal, Error)
        assert "committed" in refusal.message
        assert Register(state).read().asking == []


async def test_whoever_asks_without_its_keys_proof_does_not_get_to_the_host(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster:
        asks = Asks(cluster.network, cluster.coordinator.node_port, fingerprint(state), FRIEND)
        async with asks.hello(certificate=Identity.fresh().certificate) as (_, answer):
            assert isinstance(answer, Error)
            assert "signature is wrong" in answer.message


async def test_a_man_in_the_middle_makes_the_codes_differ(model: Path, state: StateDir) -> None:
    """He announces himself in the host's place, and asks there with a key of his own and the friend's own words."""
    async with open_to_friends(model, state) as cluster, trio.open_nursery() as nursery:
        real = cluster.coordinator.node_port
        middle = Identity.fresh()
        own = Asks(cluster.network, real, fingerprint(state), "192.168.1.66")
        own.identity = middle

        async def between(channel: Any) -> None:
            async with open_link(channel) as link:
                await link.send(Challenge(new_nonce()))
                hello = await first_message(link)
                assert isinstance(hello, Hello)
                async with own.hello(asks=hello.asks) as (host, asking):
                    await link.send(asking)
                    await host.send(await first_message(link))
                    await host.receive()

        async def listen(*, task_status: trio.TaskStatus[int]) -> None:
            credentials = middle.credentials()
            await cluster.network.listen(HERE, 0, between, credentials=credentials, task_status=task_status)

        port: int = await nursery.start(listen)
        anna = Friend(cluster, state, middle.fingerprint)
        anna.membership.at(None, port)
        nursery.start_soon(anna.run)
        await anna.until_shown("asking")
        (asker,) = await asked(state)
        assert asker.code != anna.code
        with pytest.raises(ConfigError, match="no machine asks"):
            Register(state).approve(anna.code)
        nursery.cancel_scope.cancel()


def test_the_code_depends_on_all_that_it_is_made_of() -> None:
    parts = [bytes([number]) * 32 for number in range(4)]
    codes = {code(*parts)}
    for place in range(4):
        codes.add(code(*(bytes([9]) * 32 if place == at else part for at, part in enumerate(parts))))
    assert len(codes) == 5
    assert all(len(shown) == 6 and shown.isdecimal() for shown in codes)


def test_two_machines_never_show_one_code(state: StateDir) -> None:
    register = Register(state)
    first = register.ask(Asker("123456", "anna", "ab" * 32, FRIEND, 2**33))
    with pytest.raises(TrustError, match="the same code"):
        register.ask(Asker("123456", "bert", "cd" * 32, FRIEND, 2**33))
    assert register.ask(Asker("123456", "anna", "ab" * 32, FRIEND, 2**33)) == first
    register.nobody_is_connected()
    assert register.read().asking == []
    register.ask(Asker("123456", "anna", "ab" * 32, FRIEND, 1))
    with pytest.raises(ConfigError, match="no machine asks"):
        register.approve("123456")


def test_the_answer_is_known_by_the_register(state: StateDir) -> None:
    register = Register(state)
    asker = register.ask(Asker("123456", "anna", "ab" * 32, FRIEND, 2**33))
    assert register.answer_to(asker) is None
    register.approve("123-456")
    assert register.answer_to(asker) is True
    register.remove("anna")
    assert register.answer_to(asker) is False
