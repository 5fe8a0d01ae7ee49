"""On a CPU, memory that a step has freed stays with the process: glibc would give it back to the kernel, and get it again
page by page in the next step, which costs a step 1 to 3 %, and the loading more.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in malloc.h


def keep_freed_memory() -> None:
    """Does nothing where the C library is another."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
