"""What all tests share: none of them depends on, or leaves, what the user's cache has of kernels and layers."""

import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SLOW = {"clients", "discovery", "end_to_end", "packaging"}
CLUSTERS = {"coordinator", "node"}
NOWHERE = Path(__file__) / "cache"
"""No folder can be made here."""


def pytest_configure() -> None:
    """Before anything imports torch. What is started inherits both.

    One thread each: as many tests run at once as there are cores, and nothing that they compute is large. SIGINT ends
    processes also if the tests run in the background of a shell, which has it ignored.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def entry_points_read_once() -> Iterator[None]:
    """All distributions are looked through for them: a hundredth of a second, for each node of each test.

    So long as nothing is installed: then a folder changes.
    """
    from core import plugins

    @cache
    def found(group: str, folders: tuple[tuple[str, int], ...]) -> EntryPoints:
        return entry_points(group=group)

    def folders() -> Iterator[tuple[str, int]]:
        for folder in sys.path:
            yield folder, Path(folder).stat().st_mtime_ns if Path(folder).exists() else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "entry_points", lambda group: found(group, tuple(folders())))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is slow by where it is; in the rooms of coordinator and node, what takes a model starts a cluster."""
    for item in items:
        room = item.path.relative_to(TESTS).parts[0]
        starts_cluster = room in CLUSTERS and "model" in getattr(item, "fixturenames", ())
        if room in SLOW or starts_cluster:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if sys.platform == "win32" and item.get_closest_marker("unix"):
        pytest.skip("Windows has no such signals or permissions")


@pytest.fixture(autouse=True, scope="session")
def no_kept_times(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from core.runtime import kept_file
    from core.runtime.kernel_choice import CHOOSER

    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHOOSER.kept, "path", folder / "kernels.json")
        patch.setattr(kept_file, "user_cache_path", lambda name: NOWHERE)
        yield
