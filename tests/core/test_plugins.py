"""The plugin host: what works is added, what doesn't is set aside with its cause, and everything else goes on."""

import re
from collections.abc import Callable
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from core import (
    Architecture,
    CheckpointError,
    ConfigError,
    Plan,
    Planner,
    PlanRequest,
    Source,
    hookimpl,
)
from core.blocks import Plain
from core.errors import PluginError
from core.plugins import PluginHost
from core.protocol.codec import MAX_FRAME_BYTES
from core.testing.transport import MemoryTransport

Lay = Callable[[str, str], Distribution]

GOOD = """
from core import Planner, hookimpl

class Fair(Planner):
    name = "fair"
    def plan(self, request): ...

@hookimpl
def core_planners():
    return [Fair]
"""


class Fair(Planner):
    name = "fair"

    def plan(self, request: PlanRequest) -> Plan:
        return Plan(())


class Other(Fair):
    name = "other"


class Family(Architecture):
    name = "family"
    model_types = ("family", "cousin")
    read_config = layer_tensors = non_layer_tensors = build_layers = build_embed_and_head = lambda *_: None  # type: ignore


def plugin(**hooks: object) -> SimpleNamespace:
    """A plugin whose hooks return what is given for each."""

    def implement(value: object) -> Callable[[], object]:
        return hookimpl(lambda: value)

    return SimpleNamespace(**{name: implement(value) for name, value in hooks.items()})


def cause(bad: object) -> str:
    """Why `bad` is set aside; a good plugin after it works all the same."""
    host = PluginHost()
    host.register(bad, "bad")
    host.register(plugin(core_planners=[Fair]), "good")
    assert host.planners.names() == ["fair"]
    (broken,) = host.broken
    assert broken.name == "bad"
    return broken.cause


@pytest.fixture
def lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lay:
    """Lays a distribution of one module on the path, with an entry point of the module's name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def distribution(module: str, source: str) -> Distribution:
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[core.plugins]\n{module} = {module}\n")
        return Distribution.at(info)

    return distribution


def load(distribution: Distribution) -> PluginHost:
    host = PluginHost()
    (entry,) = distribution.entry_points
    host.load(entry)
    return host


def test_every_built_in_loads() -> None:
    host = PluginHost.installed()
    assert [broken for broken in host.broken if broken.distribution == "core-cluster"] == []
    for registry in (
        host.architectures,
        host.quantizers,
        host.transports,
        host.planners,
        host.checkpoint_formats,
    ):
        assert registry.names(), f"no built-in {registry.kind}"


def test_an_installed_plugin_says_what_it_adds_and_whose_it_is(lay: Lay) -> None:
    (loaded,) = load(lay("plugin_fair", GOOD)).loaded
    assert (loaded.name, loaded.distribution, loaded.version) == ("plugin_fair", "plugin_fair", "1.2")
    assert loaded.adds == ["planner fair"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import sys; sys.exit('needs a GPU')", "SystemExit: needs a GPU"),
        ("import a_module_that_is_nowhere", "ModuleNotFoundError: No module named 'a_module_that_is_nowhere'"),
        ("this is no python", "SyntaxError: "),
    ],
)
def test_a_plugin_that_fails_at_import_is_set_aside(lay: Lay, source: str, expected: str) -> None:
    (broken,) = load(lay("plugin_sad", source)).broken
    assert (broken.name, broken.distribution, broken.version) == ("plugin_sad", "plugin_sad", "1.2")
    assert broken.cause.startswith(expected)


def test_a_plugin_that_fails_at_import_does_not_touch_the_others(lay: Lay) -> None:
    lay("a_plugin_sad", "raise RuntimeError('no licence')")
    lay("b_plugin_fair", GOOD)
    host = PluginHost.installed()
    assert "a_plugin_sad" in {broken.name for broken in host.broken}
    assert "fair" in host.planners.names()
    assert "llama" in host.architectures.names()


def test_ctrl_c_while_loading_is_not_swallowed(lay: Lay) -> None:
    with pytest.raises(KeyboardInterrupt):
        load(lay("plugin_slow", "raise KeyboardInterrupt"))


def test_an_entry_point_without_a_distribution_loads() -> None:
    host = PluginHost()
    host.load(EntryPoint("nowhere", "no_such_module", "core.plugins"))
    assert host.broken[0].distribution == "?"


def test_a_misspelt_hook_is_refused() -> None:
    assert "core_quantisers" in cause(plugin(core_quantisers=[], core_planners=[Other]))


def test_a_hook_with_an_argument_that_does_not_exist_is_refused() -> None:
    @hookimpl
    def core_planners(config: object) -> list[type[Planner]]:
        return [Other]

    assert "config" in cause(SimpleNamespace(core_planners=core_planners))


def test_a_missing_decorator_is_refused() -> None:
    good = plugin(core_planners=[Other])
    good.core_quantizers = list
    assert cause(good) == "PluginError: core_quantizers lacks the @hookimpl decorator"


def test_a_missing_decorator_in_an_installed_module_is_refused(lay: Lay) -> None:
    (broken,) = load(lay("plugin_bare", GOOD.replace("@hookimpl", ""))).broken
    assert broken.cause == "PluginError: core_planners lacks the @hookimpl decorator"


def test_a_plugin_without_hooks_is_told_which_there_are() -> None:
    assert "core_checkpoint_formats" in cause(SimpleNamespace())


def test_a_hook_may_have_nothing_to_add() -> None:
    host = PluginHost()
    host.register(plugin(core_planners=[]), "modest")
    assert [loaded.name for loaded in host.loaded] == ["modest"]


class Nameless(Planner):
    plan = Fair.plan


class Numbered(Fair):
    name = 5  # type: ignore[assignment]


class Unfinished(Planner):
    name = "unfinished"


class Explosive(Fair):
    def __init__(self) -> None:
        raise OSError("no such device")


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, "core_planners returned None: it must return a list of classes"),
        (Other, "it must return a list of classes"),
        ([Family], "it must return subclasses of Planner"),
        ([Other()], "it must return subclasses of Planner"),
        (["other"], "core_planners returned 'other'"),
        ([Nameless], "Nameless does not define name"),
        ([Numbered], "the name of Numbered is 5"),
        ([Unfinished], "abstract"),
        ([Explosive], "OSError: no such device"),
    ],
)
def test_a_hook_that_returns_something_else_is_refused(returned: object, expected: str) -> None:
    assert expected in cause(plugin(core_planners=returned))


def test_a_name_that_is_taken_names_both_claimants() -> None:
    host = PluginHost()
    host.register(plugin(core_planners=[Fair]), "first")
    first = host.planners.get("fair")
    host.register(plugin(core_planners=[Other, Fair]), "second")
    (broken,) = host.broken
    assert "two plugins claim the planner 'fair'" in broken.cause
    assert "'first' of unpackaged and the plugin 'second' of unpackaged" in broken.cause
    assert host.planners.get("fair") is first
    assert host.planners.names() == ["fair"], "a refused plugin adds nothing"


def test_an_architecture_without_model_types_is_refused() -> None:
    class Vague(Architecture):
        name = "vague"

    assert cause(plugin(core_architectures=[Vague])) == "PluginError: Vague does not define model_types"


@pytest.mark.parametrize("types", ["family", ["family"], ("family", 7)])
def test_model_types_that_are_no_tuple_of_strings_are_refused(types: object) -> None:
    class Slipped(Family):
        model_types = types  # type: ignore[assignment]

    expected = f"the model_types of Slipped is {types!r}: it must be a tuple of strings"
    assert expected in cause(plugin(core_architectures=[Slipped]))


def test_no_quantizer_is_called_auto() -> None:
    class Auto(Plain):
        name = "auto"

    host = PluginHost()
    host.register(plugin(core_quantizers=[Auto]), "auto")
    assert "the name of Auto is 'auto': it must be another one" in host.broken[0].cause
    assert host.quantizers.names() == []


def test_a_transport_of_small_messages_is_refused() -> None:
    class Narrow(MemoryTransport):
        max_message = MAX_FRAME_BYTES - 1

    expected = f"the max_message of Narrow is {MAX_FRAME_BYTES - 1}: it must be {MAX_FRAME_BYTES} or more"
    assert expected in cause(plugin(core_transports=[Narrow]))


def test_one_name_twice_in_a_plugin_adds_nothing() -> None:
    host = PluginHost()
    host.register(plugin(core_planners=[Fair, Fair]), "twice")
    (broken,) = host.broken
    assert broken.cause == "PluginError: it adds the planner 'fair' twice"
    assert host.planners.names() == []


def test_a_model_type_that_is_taken_names_both_claimants() -> None:
    class Rival(Family):
        name = "rival"
        model_types = ("rival", "cousin")

    host = PluginHost()
    host.register(plugin(core_architectures=[Family]), "first")
    host.register(plugin(core_architectures=[Rival]), "second")
    (broken,) = host.broken
    assert "model_type 'cousin'" in broken.cause
    assert "'first'" in broken.cause
    assert "'second'" in broken.cause
    assert host.architecture_of({"model_type": "cousin"}).name == "family"


def test_a_refused_plugin_leaves_its_names_to_others() -> None:
    host = PluginHost()
    host.register(plugin(core_planners=[Other, Nameless]), "bad")
    host.register(plugin(core_planners=[Other]), "good")
    assert host.planners.names() == ["other"]


def test_a_built_in_wins_over_a_stranger_of_its_name(lay: Lay) -> None:
    lay("aaa", GOOD.replace('"fair"', repr(PluginHost.installed().planners.names()[0])))
    assert "two plugins claim" in {broken.name: broken.cause for broken in PluginHost.installed().broken}["aaa"]


def test_asking_for_what_is_not_there_lists_what_is() -> None:
    host = PluginHost()
    host.register(plugin(core_planners=[Fair, Other]), "good")
    with pytest.raises(PluginError) as refusal:
        host.planners.get("zebra")
    assert refusal.value.title == "no planner named 'zebra'"
    assert refusal.value.hint == "there are: fair, other"


def test_asking_for_a_near_name_suggests_it() -> None:
    host = PluginHost()
    host.register(plugin(core_planners=[Fair]), "good")
    with pytest.raises(PluginError, match="did you mean 'fair'"):
        host.planners.get("fare")


def test_a_near_name_is_not_suggested_where_a_broken_plugin_may_have_had_the_asked_for_one(lay: Lay) -> None:
    host = load(lay("plugin_sad", "raise RuntimeError('no licence')"))
    host.register(plugin(core_planners=[Fair]), "good")
    with pytest.raises(PluginError) as refusal:
        host.planners.get("fare")
    assert refusal.value.hint == "there are: fair"


def test_asking_for_what_a_broken_plugin_may_have_added_says_why_it_is_missing(lay: Lay) -> None:
    host = load(lay("plugin_sad", "raise RuntimeError('no licence')"))
    with pytest.raises(PluginError) as refusal:
        host.quantizers.get("sad4")
    assert refusal.value.message == "the plugin 'plugin_sad' of plugin_sad is broken: RuntimeError: no licence"
    with pytest.raises(ConfigError) as no_architecture:
        host.architecture_of({"model_type": "sad"})
    assert "no licence" in no_architecture.value.message
    with pytest.raises(CheckpointError) as no_format:
        host.open_checkpoint(Source("nothing"))
    assert "no licence" in no_format.value.message


@pytest.mark.parametrize("model", ["models/none.gguf", "/nope", "./x", "../x", "~/none", r"C:\models\none"])
def test_a_path_that_does_not_exist_is_said_not_to(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match=f"there is no file or directory {re.escape(model)}.*check the path"):
        PluginHost().open_checkpoint(Source(model))


@pytest.mark.parametrize("model", ["name", "owner/name/other", "."])
def test_what_is_no_path_or_one_that_exists_is_no_model(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"is no model that can be read here.*a file or a Hugging Face repo id"):
        PluginHost().open_checkpoint(Source(model))


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("https://huggingface.co/Qwen/Qwen2.5-1.5B-Instruct", "--model Qwen/Qwen2.5-1.5B-Instruct"),
        ("https://huggingface.co/org/tiny/tree/main?x=1", "--model org/tiny"),
        ("https://mirror.example/org/tiny/tree/v1.0", "--model org/tiny --revision v1.0"),
        ("https://huggingface.co/org/t/blob/main/deep/q4.gguf", "--model org/t/deep/q4.gguf"),
        ("http://localhost:80/org/t/resolve/main/q4.gguf?download=true", "--model org/t/q4.gguf"),
        ("hf.co/org/tiny-GGUF:Q4_K_M", "--model org/tiny-GGUF"),
    ],
)
def test_the_address_of_a_page_is_answered_with_the_name(address: str, named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        PluginHost.installed().open_checkpoint(Source(address))
    assert caught.value.title == f"{address} is an address"
    assert caught.value.hint == f"give {named}"


@pytest.mark.parametrize("model", ["llama3", "qwen2.5:7b"])
def test_a_name_of_ollamas_is_answered_with_how_names_look(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"OWNER/NAME as in Qwen/Qwen2\.5-1\.5B-Instruct \(names of Ollama's"):
        PluginHost.installed().open_checkpoint(Source(model))


def test_an_architecture_is_found_by_any_of_its_model_types() -> None:
    host = PluginHost()
    host.register(plugin(core_architectures=[Family]), "good")
    assert host.architecture_of({"model_type": "cousin"}).name == "family"
    with pytest.raises(ConfigError, match="supported: cousin, family"):
        host.architecture_of({"model_type": "stranger"})


def test_an_architecture_that_recognises_many_is_named_among_those_that_there_are() -> None:
    class Anything(Family):
        name = "anything"
        model_types = ()

    host = PluginHost()
    host.register(plugin(core_architectures=[Family, Anything]), "good")
    with pytest.raises(ConfigError, match="supported: cousin, family, what anything recognises"):
        host.architecture_of({"model_type": "stranger"})
