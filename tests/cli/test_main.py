"""The `core` command itself: help, version, and how failures end."""

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer

import core
from core import cli
from core.errors import ConfigError, CoreError, PluginError

Fail = Callable[[BaseException], int | str | None]


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
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=60, check=False)


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

async def wait():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        print("ready", flush=True)

@cli.app.command()
def forever():
    trio.run(wait)

sys.argv = ["core", "forever"]
cli.main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a child on Windows")
def test_ctrl_c_ends_a_running_command_without_a_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == ""
