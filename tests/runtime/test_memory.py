"""What is let go of while weights are loaded goes back to the system; afterwards it is kept for the next batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import psutil, resource, threading, torch
from core.runtime.memory import large_blocks_returned

MB = 1 << 20

def block(size):
    return torch.ones(size * MB, dtype=torch.uint8)

def given_back():
    block(16)  # glibc's bound would be 16 MB from here on
    read_only = block(16)
    stays = block(2)
    held = psutil.Process().memory_info().rss
    del read_only
    return (held - psutil.Process().memory_info().rss) // MB

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block(4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def fewest_faults():
    return min(faults() for _ in range(20))

def compute():
    with large_blocks_returned():
        print(given_back())
        print(fewest_faults())
    print(fewest_faults())

torch.set_num_threads(1)
thread = threading.Thread(target=compute)  # as everything that loads and computes
thread.start()
thread.join()
"""


def test_blocks_are_returned_while_weights_are_loaded_and_kept_afterwards() -> None:
    small_pages = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=small_pages)
    assert done.returncode == 0, done.stderr
    returned, mapped, kept = map(int, done.stdout.split())
    assert returned >= 15
    if sys.platform == "linux" and mapped >= 500:
        assert kept < mapped / 4


HUGE_PAGES_HERE = Path("/sys/kernel/mm/transparent_hugepage")
HUGE_PAGES = """
import re, torch
from pathlib import Path
from core.runtime.device import set_up_torch

set_up_torch(threads=1)
block = torch.ones(8 << 20, dtype=torch.uint8)
mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")[1:]
print(torch.get_num_threads(), any("hg" in flags.split("\\n")[0].split() for flags in mappings))
"""


@pytest.mark.skipif(not HUGE_PAGES_HERE.exists(), reason="this system has no huge pages to ask for")
def test_large_blocks_ask_for_huge_pages() -> None:
    command = [sys.executable, "-c", HUGE_PAGES]
    unset = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=unset)
    assert done.stdout.split() == ["1", "True"], done.stderr
