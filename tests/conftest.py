"""What all tests share: none of them depends on, or leaves, what the user's cache has of kernels and layers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from core.runtime import kept_file
from core.runtime.kernel_choice import CHOOSER

NOWHERE = Path(__file__) / "cache"
"""No folder can be made here."""


@pytest.fixture(autouse=True, scope="session")
def no_kept_times(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHOOSER.kept, "path", folder / "kernels.json")
        patch.setattr(kept_file, "user_cache_path", lambda name: NOWHERE)
        yield
