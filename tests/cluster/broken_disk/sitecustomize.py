"""Breaks disks, for the check of a host alone, on the hosts that the file `unfit` in the working directory names."""

import errno
import os
import socket
import sys
from pathlib import Path


def broken(descriptor: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


if "project.doctor.joining" in sys.orig_argv and Path("unfit").exists() and socket.gethostname() in Path("unfit").read_text():
    os.fsync = broken
