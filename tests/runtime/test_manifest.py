"""What a manifest says, what it costs to make it again, and what of it a node proves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from core.errors import CheckpointError
from core.interfaces.checkpoint import Source
from core.plugins import PluginHost
from core.runtime import digests
from core.runtime.manifest import Manifest, Prover, other_file
from core.runtime.model import Model
from core.testing.checkpoints import tiny_checkpoint, write_gguf

PLUGINS = PluginHost.installed()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("sharded"), layers=4, shards=2)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory, sharded: Path) -> Path:
    return write_gguf(sharded, tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q8_0")


@pytest.fixture(params=["sharded", "gguf"])
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model.open(Source(str(path)), PLUGINS) as opened:
        yield opened


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where every file is remembered, whatever its size."""
    monkeypatch.setattr(digests, "user_cache_path", lambda _: tmp_path / "cache")
    monkeypatch.setattr(digests, "REMEMBERED_BYTES", 0)
    return tmp_path / "cache"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_files_and_tensors_are_as_they_lie_on_the_disk(path: Path, model: Model) -> None:
    made = Manifest.of(model).as_json()
    folder = path if path.is_dir() else path.parent
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json"}
    weights = {info.file for info in model.checkpoint.tensors.values()}
    index = {"model.safetensors.index.json"}
    assert {file["name"] for file in made["files"]} == (weights | names | index if path.is_dir() else weights)
    for file in made["files"]:
        data = (folder / file["name"]).read_bytes()
        assert (file["size"], file["sha256"]) == (len(data), sha256(data))
    assert [tensor["name"] for tensor in made["tensors"]] == list(model.checkpoint.tensors)
    for tensor in made["tensors"]:
        data = (folder / tensor["file"]).read_bytes()
        assert tensor["sha256"] == sha256(data[tensor["offset"] :][: tensor["nbytes"]])
    layers = {tensor["name"]: tensor["layer"] for tensor in made["tensors"]}
    assert layers["model.embed_tokens.weight"] is None
    assert layers["model.layers.3.mlp.up_proj.weight"] == 3


def test_its_digest_is_that_of_what_sha256sum_prints(path: Path, model: Model) -> None:
    manifest = Manifest.of(model)
    printed = "".join(f"{file.sha256}  {file.name}\n" for file in sorted(manifest.files, key=lambda file: file.name))
    assert manifest.digest == sha256(printed.encode())
    with Model.open(Source(str(path)), PLUGINS) as again:
        assert Manifest.of(again).digest == manifest.digest


def test_progress_counts_every_byte_once(model: Model) -> None:
    calls: list[tuple[int, int]] = []
    manifest = Manifest.of(model, lambda done, total: calls.append((done, total)))
    total = sum(file.size for file in manifest.files)
    assert {of for _, of in calls} == {total}
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (total, total)


def test_what_was_hashed_is_not_read_again(cache: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Manifest.of(model).as_json()
    monkeypatch.setattr(digests, "_digest", lambda *_: pytest.fail("it hashes"))
    calls: list[tuple[int, int]] = []
    assert Manifest.of(model, lambda done, total: calls.append((done, total))).as_json() == first
    assert calls[-1][0] == calls[-1][1]


def test_a_file_that_changed_is_hashed_again(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content in (b"one", b"other"):
        file.write_bytes(content)
        assert digests.digest_file(file, [], lambda _: None).sha256 == sha256(content)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"path": 1}'])
def test_a_damaged_entry_of_the_cache_does_no_harm(cache: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    made = digests.digest_file(file, [], lambda _: None)
    [entry] = (cache / "digests").iterdir()
    entry.write_bytes(content)
    assert digests.digest_file(file, [], lambda _: None) == made
    assert msgspec.json.decode(entry.read_bytes())["digest"]["sha256"] == made.sha256


def test_where_nothing_can_be_remembered_it_is_hashed_all_the_same(cache: Path, tmp_path: Path) -> None:
    cache.write_text("no directory")
    file = tmp_path / "file"
    file.write_bytes(b"content")
    assert digests.digest_file(file, [], lambda _: None).sha256 == sha256(b"content")


def test_a_file_that_changes_while_it_is_hashed_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        digests.digest_file(file, [], lambda _: file.write_bytes(b"other content") and None)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="can't be read"):
        digests.digest_file(tmp_path / "none", [], lambda _: None)


def test_a_layer_range_proves_its_own_layers(model: Model) -> None:
    manifest = Manifest.of(model)
    whole, part = manifest.proof(range(4)), manifest.proof(range(1, 3))
    assert list(part.layers) == list(whole.layers[1:3])
    assert len(set(whole.layers)) == 4
    assert part.rests == whole.rests
    assert part.manifest == bytes.fromhex(manifest.digest)
    weights = {info.file for info in model.checkpoint.tensors.values()}
    assert set(part.rests) == weights
    assert not weights & set(part.files), "they are proven by layers"


def test_the_coordinators_own_copy_proves_itself(model: Model) -> None:
    layers = range(1, 3)
    proof = Manifest.of(model).proof(layers)
    assert other_file(model, layers, proof) is None
    with Prover(model, layers, proof) as prover:
        for name in model.layer_tensor_names(range(1, 2)):
            prover.seen(name)
        assert prover.difference() is None, "also of tensors that nobody has read"


def test_another_tokenizer_in_a_gguf_is_found(gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / gguf.name
    copy.write_bytes(gguf.read_bytes().replace(b"<|im_start|>", b"<|xx_start|>"))
    with Model.open(Source(str(gguf)), PLUGINS) as model:
        proof = Manifest.of(model).proof(range(2))
    with Model.open(Source(str(copy)), PLUGINS) as model:
        difference = other_file(model, range(2), proof)
        assert difference == ("tiny.gguf says other things of its tensors, or beside them", ("tiny.gguf",))
