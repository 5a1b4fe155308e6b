"""The author's guide is true: its code is the example's code and runs, and every hook is in it as it is."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from core import hookspecs
from core.plugins import PluginHost

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
EXAMPLE = PLUGINS / "core-plugin-example"
GUIDE = (PLUGINS / "README.md").read_text(encoding="utf-8")
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if hasattr(hook, f"{hookspecs.PROJECT}_spec")}
FILES = dict(re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_in_the_guide_with_its_exact_signature(name: str) -> None:
    hook = HOOKS[name]
    parameters = ", ".join(hook.__code__.co_varnames[: hook.__code__.co_argcount])
    assert f"`{name}({parameters}) -> {hook.__annotations__['return']}`" in GUIDE


def test_the_guide_names_no_other_hook() -> None:
    assert set(re.findall(r"`(core_\w+)\(", GUIDE)) == set(HOOKS)


def test_every_block_of_code_says_which_file_it_is() -> None:
    assert len(re.findall(r"^```(?:python|toml)$", GUIDE, re.MULTILINE)) == len(FILES)


@pytest.mark.parametrize("name", [name for name in FILES if (EXAMPLE / name).exists()])
def test_the_guide_shows_the_example_as_it_is(name: str) -> None:
    assert FILES[name] == (EXAMPLE / name).read_text(encoding="utf-8")


def test_the_guide_leaves_out_nothing_of_the_example() -> None:
    example = {path.relative_to(EXAMPLE).as_posix() for path in EXAMPLE.rglob("*.py")} | {"pyproject.toml"}
    assert example <= set(FILES)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """An empty directory, and the guide followed."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def run_python(*args: str, cwd: Path) -> None:
    path = os.pathsep.join(filter(None, (str(cwd), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    command = [sys.executable, *args]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_code_in_the_guide_runs(project: Path) -> None:
    run_python("-m", "pytest", "-p", "no:cacheprovider", "tests", cwd=project)


def test_the_project_in_the_guide_builds(project: Path) -> None:
    run_python("-m", "build", "--wheel", "--no-isolation", cwd=project)
    (wheel,) = (project / "dist").glob("*.whl")
    assert wheel.name == "core_plugin_example-0.1.0-py3-none-any.whl"


def test_the_message_of_a_broken_plugin_is_the_one_that_the_guide_shows() -> None:
    host = PluginHost()
    host.register(SimpleNamespace(core_quantizers=list), "example")
    assert f"\nbroken: {host.broken[0].cause}\n" in GUIDE
