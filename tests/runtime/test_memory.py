"""What is let go of while weights are loaded goes back to the system, whatever was taken after it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import psutil, torch
from core.runtime.memory import return_large_blocks

MB = 1 << 20
return_large_blocks()

def block(size):
    return torch.ones(size * MB, dtype=torch.uint8)

block(16)  # glibc's bound would be 16 MB from here on
read_only = block(16)
stays = block(2)
held = psutil.Process().memory_info().rss
del read_only
print((held - psutil.Process().memory_info().rss) // MB)
"""


def test_a_block_is_returned_that_others_lie_behind() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 15
