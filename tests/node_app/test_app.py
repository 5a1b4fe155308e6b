"""The app around a real node in a cluster without sockets, and the page that another start talks to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from core.discovery.advert import Advert
from core.errors import ConfigError
from core.node.settings import NodeSettings
from core.plugins import PluginHost
from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster_in_memory import Machine, MemoryCluster, memory_cluster
from core.trust.identity import Identity
from core.trust.invite import new_invite
from core.trust.link import InviteLink
from core.trust.register import Register
from core.trust.state_dir import StateDir
from node_app import single
from node_app.app import App
from node_app.files import Folders
from node_app.joining import Target
from node_app.settings import Limits, SettingsFile
from node_app.status import State, Status

SECONDS = 300
LIMITS = Limits(
    memory_gb=0.064, threads=1, device="cpu", pause_on_battery=False, cpu_percent=None, gpu_percent=None,
    free_memory_gb=None,
)  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=6)


class Watched:
    """An app, and each status that it has shown."""

    def __init__(self, folder: Path, plugins: Callable[[], PluginHost] = PluginHost.installed) -> None:
        self.folders = Folders.under(folder)
        self.state = StateDir.open(self.folders.state)
        self.opened = ""
        self.browsed = trio.Event()
        file = SettingsFile(self.folders.config / "settings.json")
        self.app = App(file, self.state, self.folders.logs / "log", "1.2.3", self._open, plugins)
        self.shown: list[Status] = []
        self._changed = trio.Event()
        self.app.show_to(self._note)

    def _open(self, url: str) -> bool:
        self.opened = url
        trio.from_thread.run_sync(self.browsed.set)
        return True

    def _note(self, status: Status) -> None:
        self.shown.append(status)
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, state: State) -> Status:
        """The first status of that state from now on, the present one included."""
        while (status := self.app.status).state is not state:
            await self._changed.wait()
        return status

    async def until_reason(self, words: str) -> Status:
        while words not in (status := self.app.status).reason:
            await self._changed.wait()
        return status

    @asynccontextmanager
    async def running(self) -> AsyncIterator[App]:
        """With limits that nothing on this machine trips; it quits at the end."""
        with trio.fail_after(SECONDS):
            async with trio.open_nursery() as nursery:
                await nursery.start(self.app.run)
                self.app.change_limits(LIMITS)
                yield self.app
                self.app.quit()


def through(machine: Machine) -> Callable[[], PluginHost]:
    """Plugins whose transport, by the name that nodes use, is the cluster's."""

    def plugins() -> PluginHost:
        host = PluginHost.installed()
        for name in (NodeSettings("").reached_by, machine.name):
            host.transports.add(name, machine)
        return host

    return plugins


def where(cluster: MemoryCluster) -> str:
    return f"127.0.0.1:{cluster.coordinator.node_port}"


async def test_from_an_invite_to_ready_and_to_goodbye(model: Path, tmp_path: Path) -> None:
    async with memory_cluster(model, min_nodes=1) as cluster:
        watched = Watched(tmp_path, through(Machine(cluster.network)))
        async with watched.running() as app:
            assert app.status.state is State.NOT_JOINED
            app.join(where(cluster))
            status = await watched.until(State.READY)
            assert (status.cluster, status.layers) == (where(cluster), range(6))
            assert status.memory > 0
            await cluster.ready()
            assert await cluster.text(tuple(range(40, 60)), 4)
            busy = await watched.until(State.BUSY)
            assert busy.tokens_today >= 20
            [node] = cluster.coordinator.status().nodes
            assert node.node_id == app.settings.node_id
        assert cluster.coordinator.status().nodes == ()
        assert {State.NOT_JOINED, State.CONNECTING, State.LOADING} <= {status.state for status in watched.shown}
        again = Watched(tmp_path)
        assert again.app.settings == app.settings
        assert again.app._usage.today == app._usage.today


async def test_a_pause_is_told_to_the_cluster_and_kept(model: Path, tmp_path: Path) -> None:
    async with memory_cluster(model, min_nodes=1) as cluster:
        watched = Watched(tmp_path, through(Machine(cluster.network)))
        async with watched.running() as app:
            app.join(where(cluster))
            await cluster.ready()
            app.pause()
            await cluster.until(lambda status: status.nodes[0].state == "paused")
            assert (await watched.until(State.PAUSED)).reason.startswith("until you resume it")
            assert Watched(tmp_path).app.settings.paused
            app.resume()
            await cluster.ready(after_epoch=1)


async def test_by_an_invite_to_another_machine(model: Path, tmp_path: Path) -> None:
    """Once: with a used one, and after its host removed this machine, the app says so."""
    host, here = "192.168.1.7", "192.168.1.9"
    state = StateDir.open(tmp_path / "host")
    async with memory_cluster(
        model, min_nodes=1, node_host="0.0.0.0", state_dir=state.path, advertise=(host,)
    ) as cluster:
        _, link = new_invite(state, 3600)
        watched = Watched(tmp_path / "friend", through(Machine(cluster.network, here)))
        async with watched.running() as app:
            app.join(str(link))
            status = await watched.until(State.READY)
            assert status.cluster == f"{host}:{cluster.coordinator.node_port}"
            [member] = Register(state).read().nodes
            Register(state).remove(member.name)
            assert "removed" in (await watched.until(State.ERROR)).reason
            app.join(str(link))
            assert "used" in (await watched.until_reason("used")).reason
            app.leave_cluster()
            await watched.until(State.NOT_JOINED)
            assert not list(watched.state.path.glob("cluster*"))


async def test_courtesy_pauses_for_its_own_reason(model: Path, tmp_path: Path) -> None:
    async with memory_cluster(model, min_nodes=1) as cluster:
        watched = Watched(tmp_path, through(Machine(cluster.network)))
        async with watched.running() as app:
            app.join(where(cluster))
            await cluster.ready()
            app.change_limits(replace(LIMITS, free_memory_gb=10**6))
            status = await cluster.until(lambda status: status.nodes[0].state == "paused")
            assert "other programs need the memory" in status.nodes[0].detail
            assert app.resumable
            app.change_limits(LIMITS)
            await cluster.ready(after_epoch=1)


async def test_another_memory_cap_is_offered_anew(model: Path, tmp_path: Path) -> None:
    async with memory_cluster(model, min_nodes=1) as cluster:
        watched = Watched(tmp_path, through(Machine(cluster.network)))
        async with watched.running() as app:
            app.join(where(cluster))
            await cluster.ready()
            app.change_limits(replace(LIMITS, memory_gb=0.001))
            status = await cluster.until(lambda status: "does not fit" in status.detail)
            assert [node.node_id for node in status.nodes] == [app.settings.node_id]


async def test_what_can_not_be_is_an_error_until_it_is_changed(model: Path, tmp_path: Path) -> None:
    async with memory_cluster(model, min_nodes=1) as cluster:
        watched = Watched(tmp_path, through(Machine(cluster.network)))
        async with watched.running() as app:
            app.change_limits(replace(LIMITS, device="cuda:7"))
            app.join(where(cluster))
            assert "no device 'cuda:7'" in (await watched.until(State.ERROR)).reason
            app.change_limits(LIMITS)
            await cluster.ready()


async def test_what_nobody_expected_is_a_sentence_and_a_trace_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> PluginHost:
        raise KeyError("surprise")

    watched = Watched(tmp_path, broken)
    async with watched.running() as app:
        app.join("127.0.0.1:1")
        status = await watched.until(State.ERROR)
        assert status.reason == "the node failed (KeyError); the log says more"
        assert "KeyError: 'surprise'" in caplog.text
        app.leave_cluster()
        await watched.until(State.NOT_JOINED)


async def test_what_failed_is_tried_again_when_the_user_says_so(tmp_path: Path) -> None:
    mended, again = False, trio.Event()

    def plugins() -> PluginHost:
        if not mended:
            raise ConfigError("the disk is full")
        trio.from_thread.run_sync(again.set)
        return PluginHost.installed()

    watched = Watched(tmp_path, plugins)
    async with watched.running() as app:
        app.join("127.0.0.1:1")
        assert (await watched.until(State.ERROR)).reason == "the disk is full"
        app.pause()
        assert app.status.state is State.ERROR
        mended = True
        app.resume()
        await again.wait()


async def test_what_a_full_disk_does_not_take_is_told_and_holds_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)

    def full(state: StateDir, name: str, data: bytes) -> None:
        raise ConfigError(f"{name} can't be written", "no space left")

    monkeypatch.setattr(StateDir, "write", full)
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(watched.app.run)
            assert watched.app.notice == "app.json can't be written: no space left"
            with pytest.raises(ConfigError, match="it holds until core-node ends"):
                watched.app.pause()
            assert watched.app.settings.paused
            watched.app.quit()
    assert watched.app.notice == "tokens.json can't be written: no space left"


async def test_who_has_lost_the_settings_is_a_member_still(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.app.join(str(InviteLink(("192.168.1.7",), 7001, bytes(32), bytes(16), 2**31)))
    assert watched.app.settings.joined == Target("192.168.1.7", 7001, invited=True)
    (watched.folders.config / "settings.json").write_text("{")
    again = Watched(tmp_path).app
    assert again.settings.joined == watched.app.settings.joined
    again.leave_cluster()
    assert Watched(tmp_path).app.settings.joined is None


async def test_with_no_node_there_is_no_goodbye_to_wait_for(tmp_path: Path, autojump_clock: MockClock) -> None:
    watched = Watched(tmp_path)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched.app._node_runner.run)
        await wait_all_tasks_blocked()
        watched.app.quit()
    assert trio.current_time() == began


async def test_it_quits_while_it_can_not_connect(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    async with watched.running() as app:
        app.join("127.0.0.1:1")
        status = await watched.until_reason("the host is off or out of reach, this machine keeps trying")
        assert status.state is State.CONNECTING


async def test_another_start_hands_its_invite_over(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    with single.only_one(watched.state):
        async with watched.running() as app:
            with pytest.raises(single.AlreadyRunning), single.only_one(watched.state):
                pass
            running = await trio.to_thread.run_sync(single.find_running, watched.state)
            assert running.url == app.page.url
            with pytest.raises(ConfigError, match="that is no invite"):
                await trio.to_thread.run_sync(running.follow, "nonsense")
            assert "that is no invite" in app.status.reason, "it is told where a person looks"
            await trio.to_thread.run_sync(running.join, "127.0.0.1:1")
            assert (app.settings.joined, app.notice) == (Target("127.0.0.1", 1), "")
            ticket = await trio.to_thread.run_sync(running.ticket)
            assert ticket.startswith(f"http://127.0.0.1:{app.page.port}/open/")
            assert app.page.token not in ticket
        assert watched.state.read("app.json") is None


async def test_another_start_waits_for_one_that_is_about_to_end(tmp_path: Path) -> None:
    state = StateDir.open(Folders.under(tmp_path).state)

    def start() -> None:
        with single.only_one(state):
            pass

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            with single.only_one(state):
                single.announce(state, "http://127.0.0.1:1/token/")
                single.withdraw(state)
                nursery.start_soon(trio.to_thread.run_sync, start)
                await wait_all_tasks_blocked()


def test_an_app_that_never_answers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "HAND_OVER_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="does not answer"):
        single.find_running(StateDir.open(tmp_path))
    single.announce(StateDir.open(tmp_path), "http://127.0.0.1:1/token/")
    with pytest.raises(ConfigError, match="does not answer"):
        single.find_running(StateDir.open(tmp_path))


@pytest.mark.parametrize(
    "invite", ["", "desk", "desk:", ":7001", "localhost:99999", "10.1.2.3:7001", "http://x", "core://join/xyz"]
)
async def test_what_is_no_invite_changes_nothing(tmp_path: Path, invite: str) -> None:
    watched = Watched(tmp_path)
    with pytest.raises(ConfigError):
        watched.app.join(invite)
    assert watched.app.settings.joined is None


async def test_a_broken_file_is_told_on_the_page_and_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = Folders.under(tmp_path)
    (folders.config / "settings.json").write_text("{")
    assert "set aside" in Watched(tmp_path).app.notice
    assert "set aside" in caplog.text


async def test_a_failure_of_a_menu_line_is_told(tmp_path: Path) -> None:
    def fail(what: Any) -> None:
        raise ConfigError(f"{what} can't be written")

    watched = Watched(tmp_path)
    watched.app.attempt(fail, "it")
    assert watched.app.notice == "it can't be written"


async def test_a_cluster_that_was_found_is_asked_and_the_code_is_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = StateDir.open(tmp_path / "host")
    async with memory_cluster(model, node_host="0.0.0.0", state_dir=host.path, advertise=("192.168.1.7",)) as cluster:
        fingerprint = Identity.open(host).fingerprint
        advert = Advert("tiny", ("192.168.1.7",), cluster.coordinator.node_port, fingerprint, 1)

        async def found() -> list[Advert]:
            return [advert]

        monkeypatch.setattr("node_app.app.find", found)
        watched = Watched(tmp_path / "friend", through(Machine(cluster.network, "192.168.1.9")))
        async with watched.running() as app:
            with pytest.raises(ConfigError, match="look again"):
                app.ask(advert.key)
            assert await app.look_around() == [advert]
            app.ask(advert.key)
            status = await watched.until_reason("tell the host this code")
            assert status.state is State.CONNECTING
            while not (asking := Register(host).read().asking):
                await trio.lowlevel.checkpoint()
            assert asking[0].code in status.reason
            assert asking[0].code == status.code
            Register(host).deny(asking[0].code)
            assert "does not let this machine in" in (await watched.until(State.ERROR)).reason
            app.resume()
            await watched.until_reason("tell the host this code")
            while not (asking := Register(host).read().asking):
                await trio.lowlevel.checkpoint()
            Register(host).approve(asking[0].code)
            await watched.until(State.READY)
            assert app.status.code == ""
