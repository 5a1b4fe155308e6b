"""What is built is what works: both wheels in a clean environment, where `pip install` is all that a plugin needs."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "plugins" / "core-plugin-example"
SECONDS = 300


def run(*command: str | Path, cwd: Path) -> str:
    """What `command` prints; it sees no PYTHONPATH, and asks no model hub."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(project: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, project, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def core_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def example_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(EXAMPLE, tmp_path_factory.mktemp("example"))


@dataclass(frozen=True)
class Environment:
    """A virtual environment with both wheels. Their dependencies come from the environment that runs the tests."""

    folder: Path
    interpreter: str

    def python(self, script: str) -> str:
        return run(self.interpreter, "-c", script, cwd=self.folder)

    def core(self, *args: str) -> str:
        command = shutil.which("core", path=str(Path(self.interpreter).parent))
        assert command, "the wheel installs no `core` command"
        return run(command, *args, cwd=self.folder)


@pytest.fixture(scope="module")
def environment(core_wheel: Path, example_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("environment")
    builder = venv.EnvBuilder(with_pip=False)
    builder.create(folder)
    interpreter = builder.ensure_directories(folder).env_exe
    install = ("install", "--quiet", "--no-deps", "--no-index", core_wheel, example_wheel)
    run(sys.executable, "-m", "pip", "--python", interpreter, *install, cwd=folder)
    # A path in a .pth file comes after the environment's own, and the .pth files in it, editable installs, don't count.
    own = run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    dependencies = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (Path(own) / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    return Environment(folder, interpreter)


def test_the_wheel_holds_core_and_every_built_in_and_nothing_else(core_wheel: Path) -> None:
    with ZipFile(core_wheel) as wheel:
        files = [PurePosixPath(name) for name in wheel.namelist()]
        entry_points = ConfigParser()
        entry_points.read_string(
            next(wheel.read(str(file)).decode() for file in files if file.name == "entry_points.txt")
        )
    packages = {file.parts[0] for file in files if not file.parts[0].endswith(".dist-info")}
    built_ins = {folder.name for folder in (ROOT / "plugins").glob("core_plugin_*")}
    assert packages == {"core", "node_app", *built_ins}
    assert set(entry_points["core.plugins"].values()) == built_ins
    assert {PurePosixPath("core/py.typed"), PurePosixPath("node_app/web/page.html")} <= set(files)


def test_core_is_imported_from_the_wheel(environment: Environment) -> None:
    modules = environment.python(
        "import core, core_plugin_llama as llama; print(core.__file__, llama.__file__, sep='\\n')"
    )
    for module in modules.splitlines():
        assert Path(module).is_relative_to(environment.folder)
        assert not Path(module).is_relative_to(ROOT)


def test_an_installed_plugin_is_listed(environment: Environment) -> None:
    listed = json.loads(environment.core("plugins", "--json"))
    assert listed["broken"] == []
    (example,) = [plugin for plugin in listed["loaded"] if plugin["name"] == "example"]
    assert example["distribution"] == "core-plugin-example"
    assert example["adds"] == ["quantizer bf16"]


def test_doctor_checks_its_bounds(environment: Environment) -> None:
    findings = json.loads(environment.core("doctor", "--json"))
    verdicts = {finding["subject"].split()[0]: finding["verdict"] for finding in findings}
    assert verdicts["core-plugin-example"] == "ok"


USE = """
import torch
from core import DType
from core.plugins import PluginHost

quantizer = PluginHost.installed().quantizers.get("bf16")
weight, x = torch.tensor([[1.0, 2.0], [3.0, 1.0 + 2**-12]]), torch.tensor([[1.0, 1.0]])
linear = quantizer.pack(weight, None, dtype=torch.float32, device=torch.device("cpu"))
assert linear.nbytes == quantizer.packed_bytes((2, 2), DType.FP32) == 8
print(linear(x).dtype, linear(x).tolist())
"""


def test_an_installed_quantizer_packs_and_multiplies(environment: Environment) -> None:
    assert environment.python(USE) == "torch.float32 [[3.0, 4.0]]\n"


SERVE = """
from pathlib import Path

import trio

from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster import open_cluster


async def main():
    model = tiny_checkpoint(Path("tiny"))
    async with open_cluster(model, "--quant", "bf16", local_nodes=1) as cluster:
        await cluster.wait_ready()
        async with cluster.client() as client:
            body = {"model": cluster.model, "prompt": "Hello", "max_tokens": 4}
            answer = await client.post("/v1/completions", json=body)
            print(answer.status_code, answer.json()["usage"]["completion_tokens"])


trio.run(main)
"""


def test_an_installed_quantizer_serves(environment: Environment) -> None:
    assert environment.python(SERVE) == "200 4\n"
