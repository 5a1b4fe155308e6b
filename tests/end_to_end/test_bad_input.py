"""What can't be done is refused in a line on standard error, with the right status, and nothing is left running."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.testing.fork_server import run_python

USAGE, FAILED = 2, 1
WEIGHTS = "model.safetensors"
QUIET = ("--log-level", "error", "--threads", "1")


def core(*arguments: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    env = {"COLUMNS": "400", **({"HF_HUB_OFFLINE": "1"} if offline else {})}
    return run_python("-m", "core", *arguments, env=env, imports_anew=offline)


def serve(model: Path | str, *options: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    ports = ("--node-port", "0", "--api-port", "0")
    return core("serve", "--model", str(model), *ports, *QUIET, *options, offline=offline)


def check_refused(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """One line that says what is wrong, and at most one more that says what to do."""
    assert done.returncode == status, done
    assert 1 <= len(done.stderr.splitlines()) <= 2, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.fixture
def damaged(model: Path, tmp_path: Path) -> Callable[[Callable[[Path], None]], Path]:
    """A copy of the model that something was done to."""

    def damage(do: Callable[[Path], None]) -> Path:
        shutil.copytree(model, tmp_path / "copy")
        do(tmp_path / "copy")
        return tmp_path / "copy"

    return damage


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


Damaged = Callable[[Callable[[Path], None]], Path]


def change_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        changed = change(tensors.pop(name))
        save_file({**tensors, **({} if changed is None else {name: changed})}, path / WEIGHTS, {"format": "pt"})

    return do


def change_config(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "wishful"}))


def truncate(path: Path) -> None:
    size = (path / WEIGHTS).stat().st_size
    os.truncate(path / WEIGHTS, size - 1000)


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    check_refused(serve(tmp_path), FAILED, str(tmp_path))


def test_a_directory_of_a_lora_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    check_refused(serve(tmp_path), FAILED, "LoRA adapter", "org/base", "merge")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("milk, bread")
    check_refused(serve(tmp_path / "notes.gguf"), FAILED, "notes.gguf")


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    check_refused(serve(tmp_path / "nowhere"), FAILED, "nowhere")


def test_a_name_that_no_hub_was_asked_for_before() -> None:
    check_refused(serve("nobody/nothing", offline=True), FAILED, "nobody/nothing")


def test_a_missing_tensor_is_named(damaged: Damaged) -> None:
    name = "model.layers.3.self_attn.q_proj.weight"
    check_refused(serve(damaged(change_tensor(name, lambda _: None))), FAILED, name)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(damaged: Damaged) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    path = damaged(change_tensor(name, lambda tensor: tensor[:100].clone()))
    check_refused(serve(path), FAILED, name, "[100, 64]", "[128, 64]")


def test_a_truncated_file_is_named(damaged: Damaged) -> None:
    check_refused(serve(damaged(truncate)), FAILED, WEIGHTS)


def test_an_unknown_architecture_is_refused_with_those_that_there_are(damaged: Damaged) -> None:
    check_refused(serve(damaged(change_config)), FAILED, "wishful", "llama", "qwen2")


@pytest.mark.parametrize("option", ["--node-port", "--api-port"])
def test_a_port_in_use_is_named(model: Path, taken_port: str, option: str) -> None:
    check_refused(serve(model, option, taken_port), USAGE, taken_port, "in use")


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("--quant", "zip", "fp16"),
        ("--device", "abacus", "cpu"),
        ("--log-level", "loud", "warning"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_there_are(model: Path, option: str, value: str, known: str) -> None:
    check_refused(serve(model, option, value), USAGE, value, known)


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("serve", "--dtype", "fp8"),
        ("serve", "--wire-dtype", "fp8"),
        ("plan", "--wire-dtype", "fp8"),
        ("serve", "--kv-dtype", "fp8"),
        ("serve", "--node-port", "70000"),
        ("serve", "--local-nodes", "many"),
        ("node", "--cluster-port", "0"),
        ("node", "--cluster-port", "http"),
        ("node", "--max-memory-gb", "-1"),
    ],
)
def test_a_value_outside_an_options_range_is_refused(command: str, option: str, value: str) -> None:
    needed = {"serve": ("--model", "any"), "plan": ("--model", "any", "--node", "8gb")}
    done = core(command, *needed.get(command, ()), option, value)
    assert done.returncode == USAGE
    assert f"Invalid value for '{option}'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_refuses_a_device_that_is_not_there() -> None:
    check_refused(core("node", "--device", "abacus", *QUIET), USAGE, "abacus", "cpu")


def test_a_work_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_refused(core("node", "--work-dir", str(tmp_path / "file"), *QUIET), USAGE, "--work-dir", "file")
