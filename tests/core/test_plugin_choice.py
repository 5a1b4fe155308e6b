"""Which of several plugins reads a model: whoever recognises it, strangers first."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from core import Architecture, Checkpoint, CheckpointFormat, Source, hookimpl
from core.errors import PluginError
from core.plugins import PluginHost


class Family(Architecture):
    name = "family"
    model_types = ("family",)
    read_config = layer_tensors = non_layer_tensors = build_layers = build_embed_and_head = lambda *_: None  # type: ignore


def formats(*classes: type[CheckpointFormat]) -> SimpleNamespace:
    return SimpleNamespace(core_checkpoint_formats=hookimpl(lambda: list(classes)))


def families(*classes: type[Architecture]) -> SimpleNamespace:
    return SimpleNamespace(core_architectures=hookimpl(lambda: list(classes)))


class Opened(Checkpoint):
    files = path = fetch = read = tokenizer = close = lambda *_: None  # type: ignore[assignment]

    def __init__(self, by: str) -> None:
        self.config, self.generation_config, self.tensors = {"by": by}, {}, {}


class Anybody(CheckpointFormat):
    """Recognises everything; the config of what it opens says by whom it was opened."""

    name = "any"

    def recognises(self, source: Source) -> bool:
        return True

    def open(self, source: Source) -> Checkpoint:
        return Opened(self.name)


def test_a_strangers_format_is_asked_before_one_that_came_earlier() -> None:
    class Special(Anybody):
        name = "special"

        def recognises(self, source: Source) -> bool:
            return source.model == "special"

    host = PluginHost()
    host.register(formats(Anybody), "built in")
    host.register(formats(Special), "stranger")
    assert host.open_checkpoint(Source("special")).config["by"] == "special"
    assert host.open_checkpoint(Source("other")).config["by"] == "any"


def test_a_strangers_architecture_is_asked_before_one_that_came_earlier() -> None:
    class Anything(Family):
        name = "anything"
        model_types = ()

        def recognises(self, config: Mapping[str, Any]) -> bool:
            return True

    class Special(Anything):
        name = "special"

    host = PluginHost()
    host.register(families(Family, Anything), "built in")
    host.register(families(Special), "stranger")
    assert host.architecture_of({"model_type": "unheard of"}).name == "special"
    assert host.architecture_of({"model_type": "family"}).name == "family"


def test_one_that_fails_when_asked_is_named() -> None:
    class Curious(Anybody):
        name = "curious"

        def recognises(self, source: Source) -> bool:
            raise KeyError("no such file")

    host = PluginHost()
    host.register(formats(Anybody, Curious), "stranger")
    with pytest.raises(PluginError, match=r"recognises.*'curious' raised KeyError: 'no such file'"):
        host.open_checkpoint(Source("model"))
