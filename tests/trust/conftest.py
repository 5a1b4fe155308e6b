from __future__ import annotations

from pathlib import Path

import pytest

from core.trust.state_dir import StateDir


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir.open(tmp_path / "state")
