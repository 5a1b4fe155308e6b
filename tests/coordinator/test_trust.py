"""Beyond one machine: who is let in, who is not and is told why, and who is turned out."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio

from core.coordinator.enrolment import open_enrolment
from core.errors import ConfigError, TrustError
from core.interfaces.dtypes import DType
from core.link import first_message, open_link
from core.node.agent import run_node
from core.node.settings import NodeSettings
from core.node.state import Activity
from core.protocol.messages import PROTOCOL_VERSION, Challenge, Error, Hello, Message, PeerHello
from core.testing.cluster_in_memory import (
    HERE,
    Machine,
    MemoryCluster,
    open_to_friends,
    plugins_on,
)
from core.trust import register as registers
from core.trust.cluster import Cluster, Membership
from core.trust.identity import Identity
from core.trust.invite import new_invite
from core.trust.proof import signature
from core.trust.register import Register
from core.trust.serving import is_serving
from core.trust.state_dir import StateDir

SECONDS = 300
HOUR = 3600


def invited(state: StateDir, name: str = "") -> Membership:
    """A friend's machine with an invite."""
    invite, link = new_invite(state, HOUR, name)
    return Membership.join(str(link), StateDir.open(state.path.parent / f"friend-{invite.id}"))


def friend(cluster: MemoryCluster, host: str = "192.168.1.9") -> Machine:
    return Machine(cluster.network, host)


async def come(cluster: MemoryCluster, membership: Membership | None, host: str = HERE) -> None:
    """A node that is to be refused: raises why."""
    settings = NodeSettings(
        "stranger", membership, host, cluster.coordinator.node_port, device="cpu", threads=1, transport=Machine.name
    )
    with trio.fail_after(SECONDS):
        await run_node(settings, plugins_on(friend(cluster)), Activity())


@asynccontextmanager
async def told(cluster: MemoryCluster, origin: str, pin: bytes | None) -> AsyncIterator[Any]:
    port = cluster.coordinator.node_port
    async with (
        cluster.network.dial(HERE, port, timeout=1, pin=pin, origin=origin) as channel,
        open_link(channel) as link,
    ):
        yield link


async def test_a_friend_joins_by_invite_and_answers(
    model: Path, state: StateDir, prompt: tuple[int, ...], oracle: str
) -> None:
    async with open_to_friends(model, state, dtype=DType.FP32) as cluster:
        membership = invited(state)
        node_id = await cluster.start_node("anna", machine=friend(cluster), membership=membership)
        await cluster.ready()
        assert await cluster.text(prompt, 24) == oracle
        assert node_id.startswith("anna-")
        (member,) = Register(state).read().nodes
        assert (member.node_id, member.connected) == (node_id, True)
        assert membership.cluster.secret is None
    assert not Register(state).read().nodes[0].connected


async def test_a_friend_whom_the_invite_names_is_called_so(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster:
        membership = invited(state, "anna's pc")
        await cluster.start_node("anna-s-pc", machine=friend(cluster), membership=membership)
        assert Register(state).read().nodes[0].name == "anna-s-pc"


async def test_a_friends_node_reaches_a_local_one_directly(model: Path, state: StateDir) -> None:
    """It dials the address at which it found the coordinator: the local node's own is no use to another machine.

    The planner keeps the order of joining.
    """
    planned = open_to_friends(model, state, min_nodes=2, planner="balanced")
    async with planned as cluster, trio.open_nursery() as nursery:
        near = NodeSettings(
            "near",
            cluster_port=cluster.coordinator.node_port,
            device="cpu",
            threads=1,
            transport=Machine.name,
            peer_host="0.0.0.0",
        )
        nursery.start_soon(run_node, near, plugins_on(Machine(cluster.network)), Activity())
        await cluster.until(lambda status: len(status.nodes) == 1)
        machine = friend(cluster)
        anna = await cluster.start_node("anna", machine=machine, membership=invited(state))
        status = await cluster.ready()
        assert [(node.node_id, node.link) for node in status.nodes] == [("near", ""), (anna, "direct")]
        sent = [msgpack.unpackb(frame) for frame in cluster.machine.sent]
        [order] = [message["payload"] for message in sent if message["type"] == "CONNECT_PEER"]
        assert order["hosts"] == [HERE]
        assert len(order["fingerprint"]) == 32
        greetings = [msgpack.unpackb(frame) for frame in machine.sent]
        [greeting] = [message["payload"] for message in greetings if message["type"] == "PEER_HELLO"]
        assert greeting["signature"], "the link is encrypted, so the downstream node proves who it is"
        nursery.cancel_scope.cancel()


async def test_two_friends_reach_each_other_directly(
    model: Path, state: StateDir, prompt: tuple[int, ...], oracle: str
) -> None:
    async with open_to_friends(model, state, min_nodes=2, dtype=DType.FP32) as cluster:
        for name, host in [("anna", "192.168.1.9"), ("bert", "192.168.1.10")]:
            await cluster.start_node(name, machine=friend(cluster, host), membership=invited(state))
        status = await cluster.ready()
        assert sorted(node.link for node in status.nodes) == ["", "direct"]
        assert await cluster.text(prompt, 24) == oracle


async def test_an_invite_lets_one_machine_in(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster:
        _, link = new_invite(state, HOUR)
        first = Membership.join(str(link), StateDir.open(state.path.parent / "first"))
        await cluster.start_node("anna", machine=friend(cluster), membership=first)
        second = StateDir.open(state.path.parent / "second")
        with pytest.raises(TrustError, match="used already"):
            await come(cluster, Membership.join(str(link), second))
        assert Membership.remembered(second) is None


async def test_expired_and_revoked_invites_and_none_are_refused_with_a_sentence(
    model: Path, state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_to_friends(model, state) as cluster:
        revoked, link = new_invite(state, HOUR)
        Register(state).revoke(revoked.id)
        with pytest.raises(TrustError, match="revoked by the host"):
            await come(cluster, Membership.join(str(link), StateDir.open(state.path.parent / "a")))
        late = invited(state)
        now = registers.time.time()
        with monkeypatch.context() as patch:
            patch.setattr(registers.time, "time", lambda: now + HOUR)
            with pytest.raises(TrustError, match="expired on"):
                await come(cluster, late)
        uninvited = invited(state)
        uninvited.cluster = Cluster((HERE,), uninvited.cluster.port, uninvited.cluster.fingerprint)
        with pytest.raises(TrustError, match="does not know this machine"):
            await come(cluster, uninvited)
        with pytest.raises(ConfigError, match="invite"):
            await come(cluster, None)
        assert cluster.coordinator.status().nodes == ()


async def test_a_member_comes_again_by_its_key_alone_also_to_a_new_coordinator(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster:
        membership = invited(state)
        friends_state = StateDir.open(state.path.parent / next(state.path.parent.glob("friend-*")).name)
        await cluster.start_node("anna", machine=friend(cluster), membership=membership)
        assert is_serving(state)
    assert not is_serving(state)
    async with open_to_friends(model, state) as cluster:
        remembered = Membership.remembered(friends_state)
        assert remembered is not None
        remembered.at(HERE, cluster.coordinator.node_port)
        await cluster.start_node("anna", machine=friend(cluster), membership=remembered)


async def test_a_copy_of_a_members_disk_is_refused_while_it_is_there_and_told_what_to_do(
    model: Path, state: StateDir
) -> None:
    async with open_to_friends(model, state) as cluster:
        membership = invited(state)
        copy = StateDir.open(state.path.parent / "copy")
        anna = await cluster.start_node("anna", machine=friend(cluster), membership=membership)
        folder = next(state.path.parent.glob("friend-*"))
        while (folder / "joining.json").exists() or not (folder / "cluster.json").exists():
            await trio.lowlevel.checkpoint()  # its thread still writes what it was told
        shutil.copytree(folder, copy.path)
        copied = Membership.remembered(copy)
        assert copied is not None
        key_file = re.escape(str(copy.path / "identity.pem"))
        with pytest.raises(TrustError, match=rf"connected, from 192\.168\.1\.9.*move {key_file} away, and join"):
            await come(cluster, copied)
        assert [node.node_id for node in cluster.coordinator.status().nodes] == [anna], "it is left in peace"
        (copy.path / "identity.pem").unlink()
        _, link = new_invite(state, HOUR)
        await cluster.start_node(
            "bert", machine=friend(cluster, "10.0.0.2"), membership=Membership.join(str(link), copy)
        )
        assert len(cluster.coordinator.status().nodes) == 2


@pytest.mark.slow  # the three seconds of the old connection
async def test_a_member_whose_old_connection_is_dead_but_not_yet_noticed_comes_again(
    model: Path, state: StateDir
) -> None:
    async with open_to_friends(model, state) as cluster:
        membership, machine = invited(state), friend(cluster)
        anna = await cluster.start_node("anna", machine=machine, membership=membership)
        machine.unplug()
        cluster.stop_node("anna")
        before = cluster.coordinator.status().nodes
        assert len(before) == 1
        await cluster.start_node("anna", machine=friend(cluster), membership=membership)
        assert [node.node_id for node in (await cluster.ready()).nodes] == [anna]


async def test_a_removed_member_is_turned_out_at_once_and_the_others_stay(
    model: Path, state: StateDir, prompt: tuple[int, ...], oracle: str
) -> None:
    async with open_to_friends(model, state, dtype=DType.FP32) as cluster:
        await cluster.start_node("anna", machine=friend(cluster), membership=invited(state))
        epoch = (await cluster.ready()).route_epoch
        spare = invited(state)
        async with trio.open_nursery() as nursery:
            ended = trio.Event()

            async def be_removed() -> None:
                with pytest.raises(TrustError, match="removed this machine"):
                    await come(cluster, spare)
                ended.set()

            nursery.start_soon(be_removed)
            await cluster.until(lambda status: len(status.nodes) == 2)
            async with cluster.generating(prompt, 24) as running:
                Register(state).remove("stranger")
                await ended.wait()
                assert await running.result() == oracle
        status = cluster.coordinator.status()
        assert (len(status.nodes), status.route_epoch) == (1, epoch)
        with pytest.raises(TrustError, match="was removed"):
            await come(cluster, spare)


async def test_a_second_coordinator_does_not_take_the_first_ones_state(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state):
        with pytest.raises(ConfigError, match="give each a --state-dir"):
            async with open_enrolment("0.0.0.0", state.path):
                raise AssertionError("it serves")


async def test_another_machines_certificate_is_refused_before_a_word_is_said(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster, trio.open_nursery() as nursery:
        membership = invited(state)
        cluster_of_another = Cluster((HERE,), membership.cluster.port, Identity.fresh().fingerprint, bytes(16))
        membership.cluster = cluster_of_another
        machine, activity = friend(cluster), Activity()
        seen = trio.Event()
        activity.on_change = lambda now: seen.set() if "certificate" in now.detail else None
        settings = NodeSettings("anna", membership, device="cpu", threads=1, transport=Machine.name)
        nursery.start_soon(run_node, settings, plugins_on(machine), activity)
        await seen.wait()
        assert machine.sent == []
        nursery.cancel_scope.cancel()


async def test_what_is_not_encrypted_is_refused_unread(model: Path, state: StateDir) -> None:
    async with open_to_friends(model, state) as cluster:
        async with told(cluster, "192.168.1.66", None) as link:
            refusal = await first_message(link)
            assert isinstance(refusal, Error)
            assert "not encrypted" in refusal.message
        async with told(cluster, HERE, None) as link:
            await link.send(Hello(PROTOCOL_VERSION, "near"))
            assert not isinstance(await first_message(link), Error), "it is on the coordinator's own machine"


FALSE = {
    "no proof": lambda key, nonce, listener: {},
    "no signature": lambda key, nonce, listener: {"certificate": key.certificate},
    "another's certificate": lambda key, nonce, listener: {
        "certificate": key.certificate,
        "signature": signature(Identity.fresh(), "node", nonce, listener),
    },
    "an older nonce": lambda key, nonce, listener: {
        "certificate": key.certificate,
        "signature": signature(key, "node", bytes(32), listener),
    },
    "meant for another listener": lambda key, nonce, listener: {
        "certificate": key.certificate,
        "signature": signature(key, "node", nonce, bytes(32)),
    },
    "meant for a neighbour": lambda key, nonce, listener: {
        "certificate": key.certificate,
        "signature": signature(key, "peer", nonce, listener),
    },
}


@pytest.mark.parametrize("false", FALSE.values(), ids=FALSE)
async def test_a_false_proof_uses_up_no_invite(model: Path, state: StateDir, false: Any) -> None:
    async with open_to_friends(model, state) as cluster:
        membership = invited(state)
        listener = membership.cluster.fingerprint
        async with told(cluster, "192.168.1.9", listener) as link:
            challenge: Message = await first_message(link)
            assert isinstance(challenge, Challenge)
            proof = false(membership.identity, challenge.nonce, listener)
            await link.send(Hello(PROTOCOL_VERSION, "anna", invite=membership.cluster.secret, **proof))
            refusal = await first_message(link)
        assert isinstance(refusal, Error)
        assert refusal.code == "not_a_member"
        assert [invite.state for invite in Register(state).read().invites] == ["open"]
        assert cluster.coordinator.status().nodes == ()


@pytest.mark.parametrize(("origin", "key", "code"), [
    ("192.168.1.66", "the thief's", "other_key"),
    ("192.168.1.66", "none", "no_proof"),
    ("192.168.1.66", "unencrypted", "protocol"),
])  # fmt: skip
async def test_a_neighbour_needs_its_key_besides_the_routes_token(
    model: Path, state: StateDir, origin: str, key: str, code: str
) -> None:
    """A token that leaked is not enough."""
    async with open_to_friends(model, state, min_nodes=2) as cluster:
        first = friend(cluster, "192.168.1.9")
        anna = invited(state)
        await cluster.start_node("anna", machine=first, membership=anna)
        await cluster.start_node("bert", machine=friend(cluster, "192.168.1.10"), membership=invited(state))
        epoch = (await cluster.ready()).route_epoch
        sent = [msgpack.unpackb(frame) for frame in cluster.machine.sent]
        [order] = [message["payload"] for message in sent if message["type"] == "CONNECT_PEER"]
        assert order["hosts"] == ["192.168.1.9"]
        thief, pin = Identity.fresh(), None if key == "unencrypted" else order["fingerprint"]
        async with (
            cluster.network.dial("192.168.1.9", order["port"], timeout=1, pin=pin, origin=origin) as channel,
            open_link(channel) as link,
        ):
            if pin is not None:
                challenge = await first_message(link)
                assert isinstance(challenge, Challenge)
                proof = signature(thief, "peer", challenge.nonce, pin) if key != "none" else None
                await link.send(PeerHello(PROTOCOL_VERSION, epoch, order["link_token"], thief.certificate, proof))
            refusal = await first_message(link)
        assert isinstance(refusal, Error)
        assert refusal.code == code
        assert cluster.coordinator.status().route_epoch == epoch
