"""Bytes that rot on a disk, their file's size and times unchanged: found by whoever loads them, and fetched again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from core_plugin_safetensors.checkpoint import SafetensorsCheckpoint
from huggingface_hub import constants

from core import DType, Source
from core.coordinator.loaded_model import load_embed_and_head
from core.errors import DamagedFile
from core.node.layer_keeper import LayerKeeper
from core.node.stage_loader import StageLoader
from core.plugins import PluginHost
from core.protocol.fields import Proof, Shard
from core.runtime import digests
from core.runtime.manifest import Manifest
from core.runtime.model import Model, Precision
from core.testing.checkpoints import tiny_checkpoint, write_gguf
from core.testing.hub import LoopbackHub, loopback_hub
from core.testing.lone_node import shard_of

CPU = torch.device("cpu")
LAYERS = range(4, 6)
SAFETENSORS, GGUF = "org/sharded", "org/quantized/tiny.gguf"
UP = "model.layers.5.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of small files too."""
    monkeypatch.setattr(digests, "user_cache_path", lambda _name: tmp_path / "digests")
    monkeypatch.setattr(digests, "REMEMBERED_BYTES", 0)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    root = tmp_path / "hub"
    tiny_checkpoint(root / SAFETENSORS, hidden_size=128, layers=6, shards=3)
    (root / GGUF).parent.mkdir(parents=True)
    write_gguf(root / SAFETENSORS, root / GGUF)
    with loopback_hub(root) as hub:
        point_at(hub.url, monkeypatch)
        yield hub


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def rot(source: Source, tensor: str, *, beside: bool = False) -> Path:
    """One bit turns in the middle of `tensor`, or in what its file says beside its tensors. The file."""
    with Model.open(source, PluginHost.installed()) as model:
        info = model.checkpoint.tensors[tensor]
        path = model.checkpoint.path(info.file)
        assert path is not None
        start = min(each.offset for each in model.checkpoint.tensors.values() if each.file == info.file)
    before, content = path.stat(), bytearray(path.read_bytes())
    content[start - 1 if beside else info.offset + info.nbytes // 2] ^= 1
    path.resolve().write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


def load_host(source: Source) -> torch.Tensor:
    """As `core serve` does it. An embedding, as it is held."""
    plugins = PluginHost.installed()
    precision = Precision(plugins.quantizers.get("fp16"), DType.FP32, DType.FP32)
    with Model.open(source, plugins) as model, torch.inference_mode():
        return load_embed_and_head(model, precision, CPU, lambda *_: None).embed(torch.tensor([3])).clone()


def loader(source: Source, shard: Shard) -> StageLoader:
    keeper = LayerKeeper(CPU, None, compiled=False)
    return StageLoader(shard, PluginHost.installed(), CPU, source.cache_dir, keeper, lambda *_: None)


def hub_shard(source: Source) -> Shard:
    """What a coordinator without the weights asks for."""
    with Model.open(source, PluginHost.installed()) as model:
        proof = Manifest.of(model).proof(LAYERS)
        commit = model.checkpoint.revision
    assert not any(proof.layers)
    told = Proof(proof.manifest, dict(proof.files), dict(proof.rests), list(proof.layers))
    local = source.cache_dir.parent / "hub" / source.model if source.cache_dir else Path()
    return shard_of(local, LAYERS, model_id=source.model, revision=commit, proof=told)


def asides(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").rglob("*.damaged"))


@pytest.mark.parametrize(("name", "beside"), [(SAFETENSORS, False), (GGUF, True)])
def test_the_host_fetches_its_damaged_files_again(hub: LoopbackHub, tmp_path: Path, name: str, beside: bool) -> None:
    source = Source(name, cache_dir=tmp_path / "cache")
    whole = load_host(source)
    path = rot(source, "model.embed_tokens.weight", beside=beside)
    assert torch.equal(load_host(source), whole)
    assert len(asides(tmp_path)) == 1
    file = path.name if name == SAFETENSORS else GGUF.removeprefix("org/quantized/")
    assert path.read_bytes() == (tmp_path / "hub" / name.removesuffix(f"/{file}") / file).read_bytes()


@pytest.mark.parametrize(
    ("name", "verb", "beside"),
    [
        (SAFETENSORS, StageLoader.fetch, False),
        (SAFETENSORS, lambda loader: loader.load(DType.FP32), True),
        (GGUF, StageLoader.hold, False),
    ],
)
def test_a_node_fetches_its_damaged_files_again(
    hub: LoopbackHub, tmp_path: Path, name: str, verb: Callable[[StageLoader], object], beside: bool
) -> None:
    source = Source(name, cache_dir=tmp_path / "cache")
    shard = hub_shard(source)
    verb(loader(source, shard))
    path = rot(source, UP, beside=beside)
    verb(loader(source, shard))
    assert len(asides(tmp_path)) == 1
    assert path.is_file()
    verb(loader(source, shard))
    assert len(asides(tmp_path)) == 1


def test_without_a_hub_a_damaged_file_is_named_and_left(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(SAFETENSORS, cache_dir=tmp_path / "cache")
    shard = hub_shard(source)
    load_host(source)
    loader(source, shard).fetch()
    point_at("http://127.0.0.1:9", monkeypatch)
    load_host(source)
    rot(source, "model.embed_tokens.weight")
    path = rot(source, UP)
    with pytest.raises(DamagedFile, match=r"model-0000.-of-00003\.safetensors is damaged: model\.embed_tokens"):
        load_host(source)
    with pytest.raises(DamagedFile, match=rf"not the coordinator's model: {UP}, in {path.name}, has changed"):
        loader(source, shard).fetch()
    assert path.is_file() and not asides(tmp_path)


@pytest.mark.parametrize("load", [load_host, lambda source: loader(source, hub_shard(source)).fetch()])
def test_what_is_still_damaged_then_is_refused(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Source], object]
) -> None:
    source, asked = Source(SAFETENSORS, cache_dir=tmp_path / "cache"), list[str]()
    load(source)
    rot(source, UP)
    if load is load_host:
        rot(source, "model.embed_tokens.weight")
    monkeypatch.setattr(SafetensorsCheckpoint, "set_aside", lambda _self, file: not asked.append(file))
    with pytest.raises(DamagedFile):
        load(source)
    assert len(asked) == (1 if load is load_host else 2), "a node's is asked about the second failure too"


def test_a_coordinator_s_wrong_digest_does_not_make_a_node_fetch_a_whole_file_again(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    source = Source(SAFETENSORS, cache_dir=tmp_path / "cache")
    shard = hub_shard(source)
    loader(source, shard).fetch()
    served = dict(hub.served)
    told = shard.proof
    lying = Proof(
        told.manifest,
        {n: bytes(32) if n.endswith("safetensors") else sha for n, sha in told.files.items()},
        {},
        told.layers,
    )
    with pytest.raises(DamagedFile, match="not the coordinator's model"):
        loader(source, shard_of(tmp_path / "hub" / SAFETENSORS, LAYERS, model_id=SAFETENSORS, proof=lying)).fetch()
    assert not asides(tmp_path)
    assert {name: count for name, count in hub.served.items() if name.endswith("safetensors")} == {
        name: count for name, count in served.items() if name.endswith("safetensors")
    }


def test_a_damaged_file_of_a_directory_is_named(tmp_path: Path) -> None:
    source = Source(str(tiny_checkpoint(tmp_path / "tiny", layers=2)))
    load_host(source)
    rot(source, "model.embed_tokens.weight")
    with pytest.raises(DamagedFile, match=r"model\.safetensors is damaged: model\.embed_tokens\.weight"):
        load_host(source)
