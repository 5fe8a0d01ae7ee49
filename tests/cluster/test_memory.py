"""What a step has freed is not asked for again."""

import subprocess
import sys

import pytest

from tests.conftest import environment

PROGRAM = """
import resource, sys
import torch
from project.cluster.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(size << 20) for size in (8, 4, 2, 8, 1)]
    del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if "keep" in sys.argv:
    keep_freed_memory()
print([faults() for _ in range(12)][-1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_stays():
    found = [
        int(subprocess.run([sys.executable, "-c", PROGRAM, word], env=environment(), capture_output=True, check=True).stdout)
        for word in ("keep", "no")
    ]
    assert found[0] < 100 < 5000 < found[1]  # of 23,552 pages
