"""Who lacks a plugin that the model needs is left out with a sentence, and never asked to load."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from core.coordinator.members import Member
from core.coordinator.requirements import Requirements
from core.installing import DISTRIBUTION, installer
from core.interfaces.checkpoint import Source
from core.link import Link
from core.node.report import installed
from core.plugins import LoadedPlugin, PluginHost
from core.protocol.fields import Plugin
from core.protocol.messages import PROTOCOL_VERSION, Hello, LeftOut
from core.testing.cluster_in_memory import memory_cluster
from core.testing.lone_node import lone_node

SECONDS = 300
OWNER = LoadedPlugin("mammoth", "core-plugin-mammoth", "1.2", ["architecture mammoth"])
REQUIREMENTS = Requirements({"architecture mammoth": OWNER})


def member(*plugins: Plugin) -> Member:
    return Member(Hello(PROTOCOL_VERSION, "a", plugins=list(plugins)), cast(Link, None))


def test_a_model_needs_its_family_its_quantizer_and_its_format(model: Path) -> None:
    found = Requirements.of(PluginHost.installed(), Source(str(model)), "llama", "int4")
    assert list(found.wanted) == ["architecture llama", "quantizer int4", "checkpoint format safetensors"]
    assert {owner.distribution for owner in found.wanted.values()} == {DISTRIBUTION}


def test_whoever_has_all_of_it_lacks_nothing(model: Path) -> None:
    plugins = PluginHost.installed()
    found = Requirements.of(plugins, Source(str(model)), "llama", "int4")
    assert found.lacking(member(*installed(plugins))) == ""


def test_a_node_that_says_nothing_of_its_plugins_may_have_it() -> None:
    assert REQUIREMENTS.lacking(member()) == ""


@pytest.mark.parametrize(
    ("has", "instead"),
    [
        (Plugin("core-plugin-other", "1.0", ["architecture other"]), ""),
        (Plugin("core-plugin-mammoth", "0.9", ["architecture calf"]), ", instead of its 0.9"),
    ],
)
def test_what_is_lacking_is_named_with_what_adds_it(has: Plugin, instead: str) -> None:
    assert REQUIREMENTS.lacking(member(has)) == (
        "it lacks the architecture mammoth of the plugin 'mammoth' (core-plugin-mammoth 1.2): "
        f"run `pip install core-plugin-mammoth==1.2` there{instead}, and start the node again"
    )


def test_of_a_plugin_without_a_package_only_the_name_is_known() -> None:
    found = Requirements({"quantizer odd": LoadedPlugin("odd", "unpackaged", "", ["quantizer odd"])})
    assert "install that there" in found.lacking(member(Plugin("x", "1", ["quantizer int4"])))


@pytest.mark.parametrize(
    ("installer", "how"),
    [("pipx", "run `pipx inject core-cluster core-plugin-mammoth==1.2`"), ("app", "the packed app takes no plugins")],
)
def test_how_to_add_it_suits_how_the_node_was_installed(installer: str, how: str) -> None:
    plugins = [Plugin("x", "1", ["quantizer int4"])]
    found = Member(Hello(PROTOCOL_VERSION, "a", plugins=plugins, installer=installer), cast(Link, None))
    assert how in REQUIREMENTS.lacking(found)


async def test_a_node_shows_what_it_is_told_that_it_lacks() -> None:
    with trio.fail_after(SECONDS):
        async with lone_node() as node:
            coordinator = await node.met()
            assert coordinator.hello.installer == installer()
            await coordinator.send(LeftOut("this machine lacks the quantizer int3"))
            await coordinator.let_go()
            assert (node.activity.state, node.activity.detail) == ("error", "this machine lacks the quantizer int3")


async def test_a_node_without_the_family_is_left_out_with_a_sentence(
    model: Path, prompt: tuple[int, ...], oracle: str
) -> None:
    others = [Plugin(DISTRIBUTION, "0.0.1", ["architecture other"])]
    elsewhere: dict[str, Any] = {"free_memory": 2**40, "max_memory_bytes": 2**40, "plugins": others}
    with trio.fail_after(SECONDS):
        async with memory_cluster(model) as cluster, cluster.join("older", **elsewhere) as older:
            told = (await older.receive()).message
            assert isinstance(told, LeftOut)
            assert told.reason.startswith("this machine lacks the architecture llama of the plugin 'llama' (")
            assert f"pip install {DISTRIBUTION}=={version(DISTRIBUTION)}` here, instead of its 0.0.1" in told.reason
            waiting = await cluster.until(lambda status: "1 more node must join" in status.detail)
            said = f"pip install {DISTRIBUTION}=={version(DISTRIBUTION)}` there, instead of its 0.0.1"
            assert "node 'older' is left out, for it lacks the architecture llama" in waiting.detail
            assert said in waiting.detail
            await cluster.start_node("a")
            status = await cluster.ready()
            assert said in status.left_out["older"]
            async with cluster.join("later", **elsewhere):
                status = await cluster.until(lambda status: "later" in status.left_out)
                assert said in status.left_out["later"]
            assert await cluster.text(prompt, 24) == oracle
