"""Checks a host before it joins a run again: python -m project.doctor.joining RANKS [WORDS] prints what makes it unfit, and
exits with 69, or else runs Python with these words. `requeue` in place of RANKS: in a step of a Slurm job, which goes back into
the queue without an unfit node, if there are others.

It takes seconds, needs no other host and looks at what breaks a host: its memory and its devices, by a product whose result is
known; the working directory's disk and /dev/shm, by a file; its GPUs, by their number and the errors that NVIDIA's library
reports. A place that only can't be written to, or is full, is no reason: not every host writes there. What lies between hosts
is checked when they meet.
"""

import errno
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from project.cluster import gpu
from project.cluster.place import host
from project.errors import LEFT_OUT
from project.survive.requeue import REQUEUE

_SIZE, _TIMES = 1024, 8  # of the matrices, and how often they are multiplied: a second on one slow core
_BYTES = 1 << 20
_BROKEN = (errno.EIO, errno.ENXIO, errno.EUCLEAN)
_PATIENCE = 60.0  # seconds for a disk or a device


def compute(device: torch.device) -> str:
    """Returns what is wrong with products of whole numbers on a device; they have one right result in any order."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randint(-64, 65, (_SIZE, _SIZE), generator=generator) for _ in range(2))
    rows = left.sum(0) @ right  # the sums of the product's columns, by another way
    first, second = left.to(device, torch.float32), right.to(device, torch.float32)
    for _ in range(_TIMES):
        product = first @ second  # below 2**24: exact, also in TF32
        if not torch.equal(product.sum(0, dtype=torch.float64).cpu().long(), rows):
            return f"{device} has computed a product wrongly"
    return ""


def disk(folder: Path) -> str:
    """Returns why the disk of a folder is broken, or ''."""
    data = os.urandom(_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
            file.seek(0)
            return "" if file.read() == data else f"{folder} does not give back what was written there"
    except OSError as error:
        return f"a file in {folder}: {error.strerror}" if error.errno in _BROKEN else ""


def gpu_errors(device: torch.device) -> str:
    """Returns the errors of a GPU that NVIDIA's library reports, or ''."""
    with suppress(gpu.NoLibrary):
        return "; ".join(f"{device} has {text}" for text in gpu.health(gpu.Nvml(device)).unfit)
    return ""


def checks(folder: Path) -> Mapping[str, Callable[[], str]]:
    """Returns the checks of this host by name: of a run that writes to this folder."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    named: dict[str, Callable[[], str]] = {}
    named |= {f"the compute check of {device}": partial(compute, device) for device in gpus or [torch.device("cpu")]}
    named |= {f"the errors of {device}": partial(gpu_errors, device) for device in gpus}
    return named | {f"the disk check of {each}": partial(disk, each) for each in (folder, Path("/dev/shm"))}


def reasons(folder: Path) -> list[str]:
    """Returns what makes this host unfit. A check that does not end is a reason, too."""
    failures: dict[str, str] = {}

    def run(name: str, check: Callable[[], str]) -> None:
        try:
            failures[name] = check()
        except Exception as error:
            failures[name] = f"{name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

    for name, check in checks(folder).items():
        thread = threading.Thread(target=run, args=(name, check), daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        failures.setdefault(name, f"{name} did not end within {_PATIENCE:.0f} s")
    return [text for text in failures.values() if text]


def main() -> int:
    """Prints what makes this host unfit, and returns the exit code; runs what was to follow, if it is fit."""
    requeues, gpus = sys.argv[1] == "requeue", torch.cuda.device_count()
    ranks = 0 if requeues else int(sys.argv[1])  # a step of one task for each node need not see all of its GPUs
    folder = Path("/dev/shm") if requeues else Path.cwd()  # which all nodes of a job share
    unfit = [f"{ranks} ranks, and {gpus} GPU(s)"] if 0 < gpus < ranks else reasons(folder)
    if unfit:
        print(f"{host()} is unfit, and does not join the run: {'; '.join(unfit)}.", flush=True)
        if requeues and REQUEUE.exclude([node := os.environ.get("SLURMD_NODENAME", "")]):
            print(f"The job goes back into the queue: Slurm starts it without {node}.", flush=True)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which Slurm ends this, before the node is excluded
            REQUEUE.requeue_elsewhere()
        return LEFT_OUT
    if sys.argv[2:]:
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    return 0


if __name__ == "__main__":
    os._exit(main())  # a check that hangs has a thread
