"""What all tests share: none of them depends on, or leaves, what the user's cache has of kernels."""

from collections.abc import Iterator

import pytest

from core.runtime.kernel_choice import CHOOSER


@pytest.fixture(autouse=True, scope="session")
def no_kept_times(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHOOSER.kept, "path", folder / "kernels.json")
        yield
