"""Checkpoints from a hub: what is downloaded, and when; what is said when it can't be."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from core_plugin_gguf.checkpoint import GgufFormat
from core_plugin_safetensors.checkpoint import SafetensorsFormat
from huggingface_hub import constants

from core import Checkpoint, CheckpointError, CheckpointFormat, Source
from core.plugins import PluginHost
from core.runtime.manifest import Manifest, other_file
from core.runtime.model import Model
from core.testing.checkpoints import tiny_checkpoint, write_gguf
from core.testing.hub import LoopbackHub, loopback_hub

SHARDS = [f"org/sharded/model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
FILE = "org/quantized/deep/tiny.gguf"
PARTS = [f"org/split/tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    root = tmp_path / "hub"
    tiny_checkpoint(root / "org/single", layers=2)
    tiny_checkpoint(root / "org/closed", layers=1)
    tiny_checkpoint(root / "org/sharded", hidden_size=128, layers=6, shards=3)
    (root / "org/quantized/deep").mkdir(parents=True)
    write_gguf(root / "org/sharded", root / FILE)
    (root / "org/split").mkdir()
    write_gguf(root / "org/sharded", root / "org/split/tiny.gguf", part_tensors=20)
    with loopback_hub(root, gated=["org/closed"]) as hub:
        point_at(hub.url, monkeypatch)
        yield hub


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does for a process that starts with it."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def test_what_a_repository_holds_instead_of_a_model_is_said(hub: LoopbackHub, tmp_path: Path) -> None:
    root = tmp_path / "hub/org"
    for name in ("adapter", "quantized", "notes"):
        (root / name).mkdir(exist_ok=True)
        (root / name / ".gitattributes").touch()
    (root / "adapter/adapter_config.json").write_text('{"base_model_name_or_path": "org/single"}')
    with pytest.raises(CheckpointError, match=r"org/adapter is a LoRA adapter.*of org/single.*merge_and_unload"):
        opened("org/adapter", tmp_path)
    with pytest.raises(CheckpointError, match=r"org/quantized holds GGUF files \(add .*: /deep/tiny\.gguf"):
        opened("org/quantized", tmp_path)
    with pytest.raises(CheckpointError, match=r"org/notes has no config\.json"):
        opened("org/notes", tmp_path)


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    point_at("http://127.0.0.1:9", monkeypatch)


def opened(model: str, tmp_path: Path, revision: str | None = None) -> Checkpoint:
    kind: type[CheckpointFormat] = GgufFormat if model.endswith(".gguf") else SafetensorsFormat
    return kind().open(Source(model, revision=revision, cache_dir=tmp_path / "cache"))


def local(model: str, tmp_path: Path) -> Checkpoint:
    return opened(str(tmp_path / "hub" / model), tmp_path)


def layer(number: int, checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.tensors if name.startswith(f"model.layers.{number}.")]


@pytest.mark.parametrize("model", ["org/single", "org/sharded", FILE, PARTS[0]])
def test_it_says_and_reads_what_the_local_one_does(hub: LoopbackHub, tmp_path: Path, model: str) -> None:
    here, there = local(model, tmp_path), opened(model, tmp_path)
    assert there.config == here.config
    assert there.generation_config == here.generation_config
    assert [info.nbytes for info in there.tensors.values()] == [info.nbytes for info in here.tensors.values()]
    there.fetch(there.tensors)
    for name in here.tensors:
        assert torch.equal(there.read(name), here.read(name))


def test_opening_downloads_no_weights(hub: LoopbackHub, tmp_path: Path) -> None:
    checkpoint = opened("org/sharded", tmp_path)
    headers = sum(100_001 for _ in SHARDS)
    assert sum(hub.served[shard] for shard in SHARDS) <= headers
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert layer(5, checkpoint)


@pytest.mark.parametrize(("model", "files"), [("org/sharded", SHARDS), (PARTS[0], PARTS)], ids=["shards", "parts"])
def test_only_the_files_that_hold_the_names_are_downloaded(
    hub: LoopbackHub, tmp_path: Path, model: str, files: list[str]
) -> None:
    checkpoint = opened(model, tmp_path)
    looked = dict(hub.served)
    names = layer(5, checkpoint)
    assert {checkpoint.tensors[name].file for name in names} == {Path(files[2]).name}
    checkpoint.fetch(names)
    assert hub.served[files[0]] == looked[files[0]]
    assert hub.served[files[1]] == looked[files[1]]
    assert hub.served[files[2]] == looked[files[2]] + (tmp_path / "hub" / files[2]).stat().st_size


@pytest.mark.parametrize(("model", "weights"), [("org/sharded", SHARDS), (FILE, [FILE]), (PARTS[0], PARTS)])
def test_the_sha256_of_weights_is_known_before_they_are_downloaded_and_after(
    hub: LoopbackHub, tmp_path: Path, model: str, weights: list[str]
) -> None:
    checkpoint = opened(model, tmp_path)
    served = dict(hub.served)
    asked = checkpoint.files()
    names = [weight.removeprefix("org/sharded/").removeprefix("org/quantized/") for weight in weights]
    names = [name.removeprefix("org/split/") for name in names]
    for weight, name in zip(weights, names, strict=True):
        assert asked[name].sha256 == hashlib.sha256((tmp_path / "hub" / weight).read_bytes()).hexdigest()
        assert checkpoint.path(name) is None
        assert hub.served[weight] == served[weight]
    checkpoint.fetch(checkpoint.tensors)
    assert checkpoint.files() == asked
    assert all(checkpoint.path(name) for name in names)


def test_a_checkpoint_of_safetensors_is_its_weights_config_and_tokenizer(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "hub/org/sharded/README.md").write_text("read me")
    checkpoint = opened("org/sharded", tmp_path)
    files = checkpoint.files()
    assert files.keys() == local("org/sharded", tmp_path).files().keys()
    assert {"tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"} < files.keys()
    for name, info in files.items():
        if not name.endswith(".safetensors"):
            path = checkpoint.path(name)
            assert path is not None, "what is small is brought here"
            assert path.stat().st_size == info.size


def test_offline_it_says_what_it_has(hub: LoopbackHub, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    online = opened("org/single", tmp_path)
    online.fetch(online.tensors)
    files = online.files()
    request.getfixturevalue("cut_off")
    assert opened("org/single", tmp_path).files() == files


def test_the_revision_is_the_commit_that_was_opened(hub: LoopbackHub, tmp_path: Path) -> None:
    for model in ("org/single", FILE):
        checkpoint = opened(model, tmp_path)
        assert checkpoint.revision in hub.commits
        assert opened(model, tmp_path, checkpoint.revision).revision == checkpoint.revision
        assert local(model, tmp_path).revision is None


@pytest.mark.parametrize("model", ["org/sharded", FILE])
def test_a_node_hashes_what_it_downloaded_against_what_the_hub_says(
    hub: LoopbackHub, tmp_path: Path, model: str
) -> None:
    layers, plugins = range(4, 6), PluginHost.installed()
    with Model.open(Source(model, cache_dir=tmp_path / "coordinator's"), plugins) as opened:
        proof = Manifest.of(opened).proof(layers)
    assert not list((tmp_path / "coordinator's").rglob("*.safetensors")), "the coordinator needs no weights for it"
    with Model.open(Source(model, cache_dir=tmp_path / "node's"), plugins) as opened:
        opened.fetch_stage(layers)
        assert other_file(opened, layers, proof) is None
        file = opened.checkpoint.tensors["model.layers.5.mlp.up_proj.weight"].file
        path = opened.checkpoint.path(file)
        assert path is not None
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert other_file(opened, layers, proof) == (f"{file} has other bytes", (file,))


def test_what_is_cached_is_not_downloaded_again(hub: LoopbackHub, tmp_path: Path) -> None:
    opened("org/sharded", tmp_path).fetch(layer(5, local("org/sharded", tmp_path)))
    opened(FILE, tmp_path).fetch(["model.norm.weight"])
    served = dict(hub.served)
    opened("org/sharded", tmp_path).fetch(layer(5, local("org/sharded", tmp_path)))
    opened(FILE, tmp_path).fetch(["model.norm.weight"])
    for file in (SHARDS[2], FILE):
        assert hub.served[file] == served[file]


@pytest.mark.parametrize(("model", "files"), [("org/sharded", SHARDS), (FILE, [FILE]), (PARTS[0], PARTS)])
def test_progress_counts_the_bytes_of_all_files(hub: LoopbackHub, tmp_path: Path, model: str, files: list[str]) -> None:
    checkpoint = opened(model, tmp_path)
    total = sum((tmp_path / "hub" / file).stat().st_size for file in files)
    calls: list[tuple[int, int]] = []
    checkpoint.fetch(checkpoint.tensors, lambda done, of: calls.append((done, of)))
    assert {of for _, of in calls} == {total}
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (total, total)
    calls.clear()
    checkpoint.fetch(checkpoint.tensors, lambda done, of: calls.append((done, of)))
    assert calls[-1] == (total, total)


@pytest.mark.parametrize("model", ["org/single", "org/sharded", FILE, PARTS[0]])
def test_without_a_hub_the_cache_serves(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    online = opened(model, tmp_path)
    online.fetch(online.tensors)
    point_at("http://127.0.0.1:9", monkeypatch)
    offline = opened(model, tmp_path)
    offline.fetch(offline.tensors)
    assert offline.config == online.config
    for name in online.tensors:
        assert torch.equal(offline.read(name), online.read(name))


def test_without_a_hub_a_part_of_the_files_is_enough_for_its_layers(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = opened("org/sharded", tmp_path)
    online.fetch(layer(5, online))
    point_at("http://127.0.0.1:9", monkeypatch)
    offline = opened("org/sharded", tmp_path)
    assert offline.tensors == online.tensors
    for name in layer(5, online):
        assert torch.equal(offline.read(name), online.read(name))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors of org/sharded is not in the cache"):
        offline.fetch(layer(0, online))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors of org/sharded is not in the cache"):
        offline.read(layer(0, online)[0])


@pytest.mark.parametrize(("model", "file"), [("org/single", r"config\.json of org/single"), (FILE, r"deep/tiny\.gguf")])
def test_without_a_hub_and_without_a_copy(cut_off: None, tmp_path: Path, model: str, file: str) -> None:
    with pytest.raises(CheckpointError, match=f"{file}.* is not in the cache.*hub can't be reached.*local path"):
        opened(model, tmp_path)


def test_offline_by_choice(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"config\.json of org/single is not in the cache"):
        opened("org/single", tmp_path)
    assert not hub.served


@pytest.mark.parametrize("by_choice", [True, False])
@pytest.mark.parametrize("model", ["org/single", "org/sharded", FILE, PARTS[0]])
def test_headers_are_kept_so_that_a_part_of_the_files_is_enough_without_a_hub(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, by_choice: bool
) -> None:
    online = opened(model, tmp_path)
    files = online.files()
    if by_choice:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    point_at("http://127.0.0.1:9", monkeypatch)
    offline = opened(model, tmp_path)
    assert (offline.tensors, offline.config, offline.files()) == (online.tensors, online.config, files)
    with pytest.raises(CheckpointError, match=r"(model|tiny).* of org/.* is not in the cache"):
        offline.fetch(offline.tensors)


@pytest.mark.parametrize("missing", SHARDS)
def test_a_cache_that_lacks_a_file_says_which(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """As another downloader leaves it, which keeps no headers."""
    online = opened("org/sharded", tmp_path)
    online.fetch(online.tensors)
    path = online.path(Path(missing).name)
    assert path is not None
    path.unlink()
    for kept in (tmp_path / "cache").rglob("core-headers"):
        shutil.rmtree(kept)
    point_at("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(CheckpointError, match=rf"{Path(missing).name} of org/sharded is not in the cache"):
        opened("org/sharded", tmp_path)


@pytest.mark.parametrize("damage", [b"", b"x" * 40])
def test_a_header_that_was_kept_and_rots_is_read_again(hub: LoopbackHub, tmp_path: Path, damage: bytes) -> None:
    tensors = opened("org/sharded", tmp_path).tensors
    for kept in (tmp_path / "cache").rglob("core-headers/*/*"):
        kept.write_bytes(damage)
    assert opened("org/sharded", tmp_path).tensors == tensors


def rot(path: Path, at: int) -> None:
    """One bit of it turns, and neither its size nor its times."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[at] ^= 1
    path.resolve().write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(("model", "file"), [("org/single", "model.safetensors"), (FILE, "tiny.gguf")])
def test_a_header_that_rots_in_the_cache_is_fetched_again(
    hub: LoopbackHub, tmp_path: Path, model: str, file: str
) -> None:
    whole = opened(model, tmp_path)
    whole.fetch(whole.tensors)
    name = next(info.file for info in whole.tensors.values())
    path = whole.path(name)
    assert path is not None
    rot(path, 0)
    again = opened(model, tmp_path)
    assert again.tensors == whole.tensors
    again.fetch(again.tensors)
    (aside,) = (tmp_path / "cache").rglob("*.damaged")
    assert aside.stat().st_size == (tmp_path / "hub" / (model if model == FILE else f"{model}/{file}")).stat().st_size


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("org/none", None, r"there is no org/none, neither here nor on the hub.*check its name.*hf auth login"),
        ("org/none/tiny.gguf", None, "there is no org/none, neither here nor on the hub"),
        ("org/closed", None, r"org/closed is gated.*ask on its page.*hf auth login"),
        ("org/single", "v9", "org/single has no revision v9"),
        ("org/quantized", None, r"org/quantized has no config\.json"),
        ("org/quantized/none.gguf", None, r"org/quantized has no none\.gguf"),
    ],
)
def test_refusals(hub: LoopbackHub, tmp_path: Path, model: str, revision: str | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(model, tmp_path, revision)


def test_pickled_weights(hub: LoopbackHub, tmp_path: Path) -> None:
    weights = tmp_path / "hub/org/single/model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(CheckpointError, match=r"org/single has no safetensors.*pickled"):
        opened("org/single", tmp_path)
    assert "org/single/pytorch_model.bin" not in hub.served


@pytest.mark.parametrize("content", [b"short", b"\xff" * 200])
def test_damaged_header(hub: LoopbackHub, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hub/org/single/model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        opened("org/single", tmp_path)


def test_a_repository_that_changes_while_it_is_read(hub: LoopbackHub, tmp_path: Path) -> None:
    checkpoint = opened(FILE, tmp_path)
    os.utime(tmp_path / "hub" / FILE, (1, 1))
    with pytest.raises(CheckpointError, match=r"org/quantized has changed while it was read.*try again"):
        checkpoint.fetch(["model.norm.weight"])


@pytest.mark.parametrize(
    ("model", "safetensors", "gguf"),
    [
        ("owner/name", True, False),
        ("Owner-1/Name_2.5-x", True, False),
        ("owner/name/file.gguf", False, True),
        ("owner/name/deep/file-Q4_0.gguf", False, True),
        ("owner/name.gguf", False, False),
        ("name", False, False),
        ("./owner/name", False, False),
        ("/owner/name", False, False),
        ("../owner", False, False),
        ("owner/name/other", False, False),
        ("/owner/name/file.gguf", False, False),
    ],
)
def test_what_looks_like_a_repository(model: str, safetensors: bool, gguf: bool) -> None:
    assert SafetensorsFormat().recognises(Source(model)) == safetensors
    assert GgufFormat().recognises(Source(model)) == gguf


def test_the_tokenizer_comes_from_the_same_revision(hub: LoopbackHub, tmp_path: Path) -> None:
    """In a process of its own: transformers reads HF_ENDPOINT when it is imported."""
    script = (
        "from pathlib import Path; from core import Source\n"
        "from core_plugin_safetensors.checkpoint import SafetensorsFormat\n"
        f"source = Source('org/single', cache_dir=Path({str(tmp_path / 'cache')!r}))\n"
        "checkpoint = SafetensorsFormat().open(source)\n"
        "checkpoint.fetch(checkpoint.tensors)\n"
        "print(checkpoint.tokenizer().encode('A token enters'))\n"
    )
    expected = str(local("org/single", tmp_path).tokenizer().encode("A token enters"))
    for endpoint in (hub.url, "http://127.0.0.1:9"):
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
        run = [sys.executable, "-c", script]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.stdout.strip() == expected, done.stderr
