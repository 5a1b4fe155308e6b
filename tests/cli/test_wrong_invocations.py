"""What can't be done as it was asked is refused, by name, before anything is begun."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from core.cli import app
from core.cli.api_client import ask
from core.cli.node import _local_token
from core.coordinator.local_nodes import LOCAL_TOKEN
from core.errors import ConfigError, CoreError, sole_error

SERVE = ("serve", "--model", "any", "--node-port", "0", "--api-port", "0")
FRIENDS = (*SERVE, "--node-host", "0.0.0.0")
PLAN = ("plan", "--model", "any", "--node")


def refusal(*arguments: str) -> str:
    """What is said of them, which end with status 2."""
    done = CliRunner().invoke(app, arguments)
    error = sole_error(done.exception) if done.exception else None
    assert isinstance(error, ConfigError) or done.exit_code == 2, done
    return str(error) if isinstance(error, ConfigError) else done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*FRIENDS, "--advertise", ""), "'' is no host"),
        ((*FRIENDS, "--advertise", "my host"), "'my host' is no host"),
        ((*FRIENDS, "--advertise", "example.org:7001"), "'example.org:7001' is no host"),
        ((*SERVE, "--chat-template", "nowhere.jinja"), "can't read a chat template from nowhere.jinja"),
        ((*SERVE, "--tool-format", "xml"), "--tool-format"),
        ((*SERVE, "--keep-responses", "-1"), "--keep-responses"),
        ((*SERVE, "--served-model-name", ""), "--served-model-name is empty"),
        ((*SERVE, "--min-nodes", "3", "--max-nodes", "2"), "--max-nodes 2"),
        ((*SERVE, "--threads", "100000"), "--threads"),
        ((*SERVE, "--recovery-time", "-1"), "--recovery-time"),
        ((*SERVE, "--recovery-time", "inf"), "--recovery-time"),
        ((*SERVE, "--rebalance", "always"), "--rebalance"),
        ((*SERVE, "--target-node-memory-gb", "inf"), "--target-node-memory-gb"),
        ((*PLAN, "a=1gb", "--node", "a=2gb"), "2 nodes are called 'a'"),
        ((*PLAN, "1gb", "--min-nodes", "3", "--max-nodes", "2"), "--max-nodes 2"),
        ((*PLAN, f"{'9' * 400}gb"), "is no size"),
        (("node", "--cluster-host", ""), "is another machine"),
        (("node", "--max-memory-gb", "inf"), "--max-memory-gb"),
        (("invite", "--expires", ""), "--expires ''"),
        (("top", "--once", "--url", ""), "--url ''"),
        (("top", "--once", "--url", "127.0.0.1:8000"), "--url '127.0.0.1:8000'"),
        (("top", "--once", "--url", "ftp://here"), "--url 'ftp://here'"),
        (("top",), "core top --once"),
        (("rebalance", "--url", "127.0.0.1:8000"), "--url '127.0.0.1:8000'"),
    ],
)
def test_it_says_what_is_wrong(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state")) if arguments[0] in ("serve", "node", "invite") else ()
    assert said in refusal(*arguments, *state)


@pytest.mark.parametrize("command", ["node", "invite", "members"])
def test_a_state_directory_is_no_file(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "can't be used: it is a file" in refusal(command, "--state-dir", str(tmp_path / "file"))


def test_a_model_on_this_machine_has_no_revisions(tmp_path: Path) -> None:
    assert "there is no revision 'main'" in refusal("manifest", str(tmp_path), "--revision", "main")


@pytest.mark.parametrize("answer", [httpx.Response(200, json=[]), httpx.Response(404, text="not here")])
async def test_what_answers_may_be_no_cluster(answer: httpx.Response) -> None:
    transport = httpx.MockTransport(lambda _: answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        with pytest.raises(CoreError, match=f"answered with status {answer.status_code}"):
            await ask(client, "GET", "/v1/cluster", "nodes")


@pytest.mark.parametrize("token", ["no hexadecimal", "00" * 15, "00" * 65])
def test_a_token_of_a_coordinator_that_is_none_is_refused_and_kept_from_others(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCAL_TOKEN, token)
    said = refusal("node")
    assert f"{LOCAL_TOKEN} is no token" in said
    assert token not in said
    assert LOCAL_TOKEN not in os.environ


def test_a_token_of_a_coordinator_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCAL_TOKEN, "ab" * 16)
    assert _local_token() == bytes.fromhex("ab" * 16)
    assert LOCAL_TOKEN not in os.environ
    assert _local_token() is None
