"""SIGABRT ends a rank at once, with exit code 75 and without a core dump.

When a collective of NCCL fails, a C++ thread of torch throws, after it has said why on standard error, and the process aborts.
That is right (TORCH_NCCL_ASYNC_ERROR_HANDLING as torch has it: the process is torn down). With CleanUpOnly it would go on, and
what a failed collective has left there could enter a gradient; without any handling it would wait for its device. But a core
dump of a process that maps a GPU's memory takes minutes in which nobody knows what happened.

A handler of Python's can't help: it runs in the main thread when that has come back, and abort() does not wait for it. So it is
three machine instructions, exit_group(75), which need neither Python nor a lock. The warden tells the others who aborted.
"""

import ctypes
import mmap
import os
import platform
import signal
from contextlib import suppress

from project.errors import TRY_AGAIN

# Exit code and number of the system call, each moved into its register, and the call.
_INSTRUCTIONS = {
    "x86_64": bytes([0xBF, TRY_AGAIN, 0, 0, 0, 0xB8, 231, 0, 0, 0, 0x0F, 0x05]),
    "aarch64": b"".join(
        instruction.to_bytes(4, "little") for instruction in (0x52800000 | TRY_AGAIN << 5, 0x52800008 | 94 << 5, 0xD4000001)
    ),  # not run yet
}
_code: list[mmap.mmap] = []  # as long as the process


def exit_on_abort() -> None:
    """Makes SIGABRT end this process at once; not those that it forks: its rank reports a loader process that aborts.

    Where this can't be done, or another handler is there (PYTHONFAULTHANDLER), all stays as it was.
    """
    instructions = _INSTRUCTIONS.get(platform.machine())
    if _code or instructions is None:
        return
    with suppress(OSError):  # a system that lets nobody write instructions
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(instructions)
        _code.append(code)
        handle = ctypes.CDLL(None).signal
        handle.restype, handle.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        before = handle(signal.SIGABRT, ctypes.addressof(ctypes.c_char.from_buffer(code)))
        if before:
            handle(signal.SIGABRT, before)
        else:
            os.register_at_fork(after_in_child=lambda: handle(signal.SIGABRT, None))
