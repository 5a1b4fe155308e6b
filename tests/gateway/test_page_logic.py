"""The page's own logic, by node's test runner, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
LOGIC = Path(__file__).with_name("page_logic.mjs")


@pytest.mark.skipif(NODE is None, reason="no node here")
def test_what_the_page_works_out() -> None:
    done = subprocess.run([str(NODE), "--test", str(LOGIC)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
