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

if "no" not in sys.argv:
    keep_freed_memory(large="keep" in sys.argv)
held = lambda: int(open("/proc/self/statm").read().split()[1])
before = held()
print([faults() for _ in range(12)][-1], held() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
@pytest.mark.slow
def test_freed_memory_stays():
    results = {}
    for mode in ("keep", "small", "no"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, mode], env=environment(), capture_output=True, check=True)
        results[mode] = [int(number) for number in done.stdout.split()]
    assert results["keep"][0] < 100 < 5000 < results["no"][0]  # of 23,552 pages
    assert results["small"][1] < 1500 < 20_000 < results["keep"][1]
