"""The `core` command itself: help, version, and how failures end."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import core
from core import cli
from core.cli.console import Bars, interruptible
from core.errors import ConfigError, CoreError, PluginError

SECONDS = 300
Fail = Callable[[BaseException], int | str | None]
COMMANDS = [command.name for command in cli.app.registered_commands]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Runs `main` with a command that raises, and returns the exit status."""

    def run(error: BaseException) -> int | str | None:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.command()
        def command() -> None:
            raise error

        monkeypatch.setattr(cli, "app", lambda: app([]))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code

    return run


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=SECONDS, check=False)


def test_version() -> None:
    done = python("-m", "core", "--version")
    assert (done.returncode, done.stdout) == (0, f"core {core.__version__}\n")


def test_help_lists_the_commands_and_imports_no_torch() -> None:
    script = (
        "import sys; from core.cli import app; app(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
    assert "plugins" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_and_cuts_nothing(command: str, columns: int) -> None:
    shown = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": str(columns)}).output
    assert max(map(len, shown.splitlines())) <= columns
    assert not re.search(r"\w(\.\.\.|…)", shown), "a name or a sentence is cut"
    missing = [name for name in option_names(command) if name not in shown.split()]
    assert missing == []


def option_names(command: str) -> list[str]:
    group: Any = typer.main.get_command(cli.app)
    parameters = (group.commands[command] if command else group).params
    shown = [each for each in parameters if not getattr(each, "hidden", False)]
    return [name for each in shown for name in (*each.opts, *each.secondary_opts) if name.startswith("--")]


def test_an_unknown_option_is_a_usage_error() -> None:
    done = python("-m", "core", "plugins", "--nonsense")
    assert done.returncode == 2
    assert "--nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_is_its_line_and_its_hint(fail: Fail, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(PluginError("no quantizer named 'x'", "there is one fewer", "install it")) == 2
    captured = capsys.readouterr()
    assert captured.err == "no quantizer named 'x': there is one fewer\ninstall it\n"
    assert captured.out == ""


def test_an_error_without_message_or_hint_is_its_title(fail: Fail, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(CoreError("it broke")) == 1
    assert capsys.readouterr().err == "it broke\n"


def test_a_config_error_exits_with_2(fail: Fail) -> None:
    assert fail(ConfigError("no such option")) == 2


def test_errors_that_nurseries_wrapped_are_reported_alike(fail: Fail, capsys: pytest.CaptureFixture[str]) -> None:
    nested = ExceptionGroup("", [ExceptionGroup("", [ConfigError("first")]), CoreError("second", "detail")])
    assert fail(nested) == 2
    assert capsys.readouterr().err == "first\nsecond: detail\n"


def test_ctrl_c_in_a_nursery_exits_with_130(fail: Fail, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(BaseExceptionGroup("", [KeyboardInterrupt()])) == 130
    assert capsys.readouterr().err == ""


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", bug)
    with pytest.raises(ZeroDivisionError):
        cli.main()


INTERRUPTIBLE = """
import sys, trio, typer
from core import cli
from core.cli.console import run

async def wait():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        print("ready", flush=True)

@cli.app.command()
def forever():
    {run}(wait)

sys.argv = ["core", "forever"]
cli.main()
"""


@contextmanager
def started(script: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said `ready`. It doesn't outlive the block."""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.unix
@pytest.mark.parametrize(
    ("run", "number", "status", "said"),
    [
        ("trio.run", signal.SIGINT, 130, ""),
        ("run", signal.SIGINT, 130, "stopping\n"),
        ("run", signal.SIGTERM, 0, "stopping\n"),
    ],
)
def test_a_signal_ends_a_running_command_without_a_traceback(
    run: str, number: signal.Signals, status: int, said: str
) -> None:
    with started(INTERRUPTIBLE.format(run=run)) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (status, said)


EARLY = """
import time
from core import __main__, cli

cli.main = lambda: (print("ready", flush=True), time.sleep(60))
__main__.main()
"""


@pytest.mark.unix
def test_ctrl_c_while_a_command_imports_ends_it_at_once_and_without_a_traceback() -> None:
    with started(EARLY) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("before", "within"), [(signal.SIG_DFL, signal.default_int_handler), (signal.SIG_IGN, signal.SIG_IGN)]
)
def test_what_is_to_be_undone_is_undone_after_ctrl_c(before: signal.Handlers, within: object) -> None:
    kept = signal.signal(signal.SIGINT, before)
    try:
        with interruptible(), Bars():
            assert signal.getsignal(signal.SIGINT) is within
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, kept)
