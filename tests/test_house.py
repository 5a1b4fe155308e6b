"""The house rules that a machine can read: who imports whom, single homes, sizes, and what no file may name."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from core import __all__ as PUBLIC

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400
ANY = frozenset({"*"})


@dataclass(frozen=True)
class Room:
    """What the files of a room may import of core, and which libraries."""

    core: frozenset[str]
    libraries: frozenset[str]

    @classmethod
    def of(cls, core: str, libraries: str = "") -> "Room":
        return cls(frozenset(core.split()), frozenset(libraries.split()))


SEAMS = "errors interfaces"
ROOMS = {
    "__init__.py": Room.of(f"{SEAMS} hookspecs", "pluggy"),
    "__main__.py": Room.of("cli"),
    "errors.py": Room.of(""),
    "one_line.py": Room.of(""),
    "installing.py": Room.of(""),
    "guard": Room.of(f"{SEAMS} guard", "torch trio"),
    "port_limits.py": Room.of(""),
    "hookspecs.py": Room.of(SEAMS, "pluggy"),
    "interfaces": Room.of(SEAMS, "trio"),
    "plugins.py": Room.of(f"{SEAMS} guard hookspecs installing", "pluggy"),
    "protocol": Room.of(f"{SEAMS} one_line protocol", "msgpack msgspec"),
    "protocol/tensors.py": Room.of(f"{SEAMS} protocol", "msgspec torch"),
    "link.py": Room.of(f"{SEAMS} guard protocol trust", "trio"),
    "blocks": Room.of(f"{SEAMS} blocks runtime", "torch"),
    "hub.py": Room.of(SEAMS, "huggingface_hub"),
    "parity.py": Room.of(f"{SEAMS} blocks guard runtime", "torch"),
    "tcp": Room.of(f"{SEAMS} port_limits tcp", "trio"),
    "trust": Room.of(f"{SEAMS} trust", "cryptography filelock msgspec platformdirs psutil"),
    "discovery": Room.of(f"{SEAMS} discovery trust", "trio zeroconf"),
    "runtime": Room.of(
        f"{SEAMS} guard plugins runtime",
        "jinja2 llguidance msgspec numpy outcome platformdirs psutil torch transformers trio",
    ),
    "gateway": Room.of(f"{SEAMS} gateway port_limits core", "litestar msgspec prometheus_client segno trio uvicorn"),
    "coordinator": Room.of(
        f"{SEAMS} coordinator discovery installing link parity plugins port_limits protocol runtime trust core",
        "msgspec psutil torch trio",
    ),
    "node": Room.of(
        f"{SEAMS} installing node link parity plugins protocol runtime trust core", "msgspec psutil torch trio"
    ),
    "cli": Room(ANY, ANY),
    "testing": Room(ANY, ANY),
}
APP = Room.of(
    "core discovery errors node one_line plugins port_limits trust", "filelock h11 msgspec platformdirs psutil trio"
)
APP_FILES = {"pictures.py": Room.of("", "PIL"), "tray.py": Room.of("", "pystray"), "gpu.py": Room.of("", "pynvml")}
PLUGIN_SURFACE = {"core", "core.blocks", "core.hub", "core.tcp", "core.errors"}
SINGLE_HOMES = {
    "litestar": ("core/gateway/", "core/testing/"),
    "uvicorn": ("core/gateway/", "core/testing/"),
    "asyncio": ("core/gateway/bridge.py", "core/gateway/server.py"),
    "cryptography": ("core/trust/",),
    "trio_websocket": ("plugins/core_plugin_websocket/",),
    "wsproto": ("plugins/core_plugin_websocket/",),
    "llguidance": ("core/runtime/grammar.py",),
    "zeroconf": ("core/discovery/multicast.py",),
    "transformers": ("core/runtime/tokenizer.py", "core/testing/", "plugins/"),
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that `path` imports, inside functions too, but not what only type checkers see."""
    return frozenset(_imports(ast.parse(path.read_text(encoding="utf-8"))))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from (_imported(node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from (name for child in node.orelse for name in _imports(child))
        else:
            yield from _imports(node)


def _imported(module: str, name: str) -> str:
    """`from core import plugins` imports core.plugins; `from core import hookimpl` imports core."""
    inner = ROOT / module.replace(".", "/") / name
    return f"{module}.{name}" if inner.is_dir() or inner.with_suffix(".py").is_file() else module


def library(module: str) -> str | None:
    """The top-level name of a module that is neither ours nor the standard library's."""
    top = module.split(".")[0]
    ours = top in ("core", "node_app") or top.startswith("core_plugin_")
    return None if ours or top in sys.stdlib_module_names else top


def room_of(path: Path) -> Room:
    inside = path.relative_to(ROOT / "core")
    return ROOMS[inside.as_posix()] if inside.as_posix() in ROOMS else ROOMS[inside.parts[0]]


def room_name(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "core":
        return None
    return parts[1] if len(parts) > 1 else "core"


def beyond(room: Room, path: Path) -> set[str]:
    """What `path` imports beside what its room may."""
    core = {name for module in imports(path) if (name := room_name(module))}
    libraries = {name for module in imports(path) if (name := library(module))}
    found = set() if room.core == ANY else {f"core's {name}" for name in core - room.core}
    return found if room.libraries == ANY else found | (libraries - room.libraries)


def by_file(found: Callable[[Path], Iterable[str]], *folders: str) -> dict[str, list[str]]:
    """The files below `folders` of which `found` finds anything, with what it finds."""
    each = {relative(path): sorted(found(path)) for path in python_files(*folders)}
    return {path: names for path, names in each.items() if names}


def test_a_room_imports_only_what_its_row_of_the_table_allows() -> None:
    assert by_file(lambda path: beyond(room_of(path), path), "core") == {}


def test_the_app_imports_only_what_its_row_of_the_table_allows() -> None:
    assert by_file(lambda path: beyond(APP_FILES.get(path.name, APP), path), "node_app") == {}


def test_nobody_imports_the_app() -> None:
    def of_the_app(path: Path) -> list[str]:
        return [module for module in imports(path) if module.split(".")[0] == "node_app"]

    assert by_file(of_the_app, "core", "plugins") == {}


def test_core_imports_no_plugin_by_name() -> None:
    def of_plugins(path: Path) -> list[str]:
        return [module for module in imports(path) if module.startswith("core_plugin_")]

    assert by_file(of_plugins, "core") == {}


def test_a_plugin_imports_the_public_surface_and_itself() -> None:
    def of_ours(path: Path) -> set[str]:
        ours = {module for module in imports(path) if not library(module) and module.startswith("core")}
        package = next(part for part in path.relative_to(ROOT / "plugins").parts if part != "core-plugin-example")
        if package == "tests":
            package = "core_plugin_example"
        inside = {module for module in ours if module.split(".")[0] == package}
        testing = {module for module in ours if module.startswith("core.testing") and "tests" in path.parts}
        return ours - inside - testing - PLUGIN_SURFACE

    assert by_file(of_ours, "plugins") == {}


@pytest.mark.parametrize("seam", ["architecture", "checkpoint", "planner", "quantizer", "transport"])
def test_every_error_that_a_seam_names_is_importable_from_core(seam: str) -> None:
    source = (ROOT / f"core/interfaces/{seam}.py").read_text(encoding="utf-8")
    assert set(re.findall(r"\b(?:[A-Z][a-z]+Error|ChannelClosed)\b", source)) <= set(PUBLIC)


@pytest.mark.parametrize("seam", ["architecture", "checkpoint", "dtypes", "planner", "quantizer", "transport"])
def test_every_class_of_a_seam_is_importable_from_core(seam: str) -> None:
    source = (ROOT / f"core/interfaces/{seam}.py").read_text(encoding="utf-8")
    assert set(re.findall(r"^class ([A-Z]\w+)", source, re.MULTILINE)) <= set(PUBLIC)


@pytest.mark.parametrize("name", SINGLE_HOMES)
def test_a_library_with_a_single_home_is_imported_only_there(name: str) -> None:
    users = [
        relative(path) for path in python_files("core", "plugins") if name in {m.split(".")[0] for m in imports(path)}
    ]
    assert users, f"nobody imports {name}"
    assert [user for user in users if not user.startswith(SINGLE_HOMES[name])] == []


def test_the_seams_import_no_torch() -> None:
    modules = ["core", "core.plugins", "core.link", "core.cli"]
    modules += [f"core.interfaces.{path.stem}" for path in (ROOT / "core/interfaces").glob("[!_]*.py")]
    script = f"import {', '.join(modules)}, sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_every_library_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    extras = {
        room: {canonicalize_name(Requirement(text).name) for text in project["optional-dependencies"][extra]}
        for room, extra in (("core/testing/", "testing"), ("node_app/", "tray"))
    }
    distributions = packages_distributions()
    undeclared = {}
    plugins = (f"plugins/{folder.name}" for folder in (ROOT / "plugins").glob("core_plugin_*"))
    for path in python_files("core", "node_app", *plugins):
        allowed = declared.union(*(names for room, names in extras.items() if relative(path).startswith(room)))
        for name in {name for module in imports(path) if (name := library(module))}:
            if not allowed & {canonicalize_name(distribution) for distribution in distributions.get(name, [])}:
                undeclared.setdefault(relative(path), set()).add(name)
    assert undeclared == {}


def test_every_dependency_is_pinned_to_a_version_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = [Requirement(text) for group in project["optional-dependencies"].values() for text in group]
    wanted += [Requirement(text) for text in project["dependencies"]]
    for requirement in wanted:
        if requirement.name != project["name"]:
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, f"{requirement} is not pinned"


def test_no_python_file_is_longer_than_400_lines() -> None:
    folders = ("core", "node_app", "plugins", "tests", "benchmarks")
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*folders)}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


REGISTRY_HOST = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|crates\.io|proxy\.golang\.org"
    r"|(?:deb|security)\.debian\.org|conda\.anaconda\.org|download\.pytorch\.org)\b"
)
MACHINE_PATH = re.compile(r"(?<![\w.~$})])/(?:root|home/\w+|Users/\w+|work|workspace|builds)/\w|\b[A-Z]:\\Users\\\w")


def committed_text() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        data = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in data:
            yield name, data.decode("utf-8")


@pytest.mark.parametrize("pattern", [REGISTRY_HOST, MACHINE_PATH], ids=["registry host", "path of a machine"])
def test_no_file_names_a_registry_or_a_build_machine(pattern: re.Pattern[str]) -> None:
    found = [
        f"{name}:{number}: {match.group()}"
        for name, text in committed_text()
        for number, line in enumerate(text.splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("pattern", "guilty"),
    [
        (REGISTRY_HOST, "https://" + "pypi." + "org/simple"),
        (REGISTRY_HOST, "files.python" + "hosted.org"),
        (MACHINE_PATH, '"/' + 'home/anna/core"'),
        (MACHINE_PATH, "cd /" + "root/src"),
        (MACHINE_PATH, "C:" + "\\Users\\anna"),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern: re.Pattern[str], guilty: str) -> None:
    assert pattern.search(guilty)
