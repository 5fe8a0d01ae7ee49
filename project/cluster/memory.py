"""Keeps memory that a step on a CPU has freed in the process: glibc would give it back to the kernel, and get it again page by
page in the next step, which costs a step 1 to 3 %, and the loading more.

But where blocks of a network are gathered and let go, one by one and of several sizes, what is kept has holes that nothing
fits: with 67 M parameters on two ranks, a rank that should hold 0.6 GB had kept 1.4 GB, as much as with DDP. To give it all
back made the steps of a small GPT a quarter slower, so that is for where memory is short.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in malloc.h
_LARGE = 1 << 20


def keep_freed_memory(large: bool = True) -> None:
    """Keeps freed memory in the process; does nothing where the C library is not glibc.

    Args:
        large: also what was 1 MiB or more; else that goes back to the kernel at once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30 if large else _LARGE)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
