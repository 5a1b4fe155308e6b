"""The contract of checkpoint formats."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.errors import CheckpointError
from core.interfaces.checkpoint import Checkpoint, CheckpointFormat, Source

TEXT = "A token enters at the first layer."


class CheckpointFormatContract:
    """The contract of `core.CheckpointFormat` and the checkpoints that it opens.

    A subclass named Test... has a fixture `checkpoint_format` that gives one, and a fixture `model` that gives the path
    of a small model on this machine: a file, or a folder.
    """

    @pytest.fixture
    def checkpoint_format(self) -> CheckpointFormat:
        raise NotImplementedError("give a fixture `checkpoint_format`")

    @pytest.fixture
    def model(self) -> Path:
        raise NotImplementedError("give a fixture `model`")

    @pytest.fixture
    def opened(self, checkpoint_format: CheckpointFormat, model: Path) -> Iterator[Checkpoint]:
        checkpoint = checkpoint_format.open(Source(str(model)))
        yield checkpoint
        checkpoint.close()

    def test_it_recognises_its_own_and_nothing_else(
        self, checkpoint_format: CheckpointFormat, model: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "notes.txt").write_text("no model", encoding="utf-8")
        assert checkpoint_format.recognises(Source(str(model))) is True
        for other in ("empty", "notes.txt", "nowhere"):
            assert checkpoint_format.recognises(Source(str(tmp_path / other))) is False

    def test_its_config_is_in_the_words_of_hugging_face(self, opened: Checkpoint) -> None:
        assert isinstance(opened.config["model_type"], str)
        assert opened.config["num_hidden_layers"] > 0
        assert isinstance(opened.generation_config.get("eos_token_id", 0), int | list)

    def test_each_tensor_is_as_its_index_says(self, opened: Checkpoint) -> None:
        opened.fetch(opened.tensors)
        for name, info in opened.tensors.items():
            tensor = opened.read(name)
            assert tuple(tensor.shape) == info.shape, name
            assert tensor.is_floating_point() and tensor.device.type == "cpu", name
            assert torch.equal(tensor, torch.stack(list(opened.slices(name)))), name
            path = opened.path(info.file)
            assert path is not None and info.offset + info.nbytes <= path.stat().st_size, name

    def test_each_tensor_is_in_one_of_its_files(self, opened: Checkpoint) -> None:
        files = opened.files()
        assert {info.file for info in opened.tensors.values()} <= set(files)
        for name, told in files.items():
            path = opened.path(name)
            assert path is None or path.stat().st_size == told.size, name

    @pytest.mark.parametrize("name", ["nothing", "../nothing", "/etc/hosts", "..", ""])
    def test_what_is_none_of_its_files_is_nowhere(self, opened: Checkpoint, name: str) -> None:
        assert opened.path(name) is None

    def test_what_is_here_already_is_fetched_at_once(self, opened: Checkpoint) -> None:
        told: list[tuple[int, int]] = []
        opened.fetch(list(opened.tensors)[:1], lambda done, total: told.append((done, total)))
        assert all(0 <= done <= total for done, total in told)

    def test_its_tokenizer_gives_back_the_text(self, opened: Checkpoint) -> None:
        tokenizer = opened.tokenizer()
        assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT

    def test_closing_it_twice_does_no_harm(self, checkpoint_format: CheckpointFormat, model: Path) -> None:
        checkpoint = checkpoint_format.open(Source(str(model)))
        checkpoint.close()
        checkpoint.close()

    def test_a_file_that_is_cut_short_is_named(
        self, checkpoint_format: CheckpointFormat, model: Path, tmp_path: Path
    ) -> None:
        copy = tmp_path / model.name
        shutil.copytree(model, copy) if model.is_dir() else shutil.copy(model, copy)
        largest = max(copy.rglob("*") if copy.is_dir() else [copy], key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        with pytest.raises(CheckpointError) as caught:
            checkpoint_format.open(Source(str(copy)))
        assert largest.name in str(caught.value)
