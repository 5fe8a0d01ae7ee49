"""Computes a pod's needs for a run, in bytes and seconds: the doctor's figures for the run, and what is added to them."""

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from project.doctor.examined import ExaminedRun
from project.doctor.findings import in_bytes
from project.launch.manifest import Wanted

log = logging.getLogger(__name__)

_GIB = 1 << 30
# In main memory, by process: torch and what comes with it; with a GPU, also what the driver and NCCL keep there.
_PROCESS, _PROCESS_GPU = 3 * _GIB // 2, 4 * _GIB
_WORKER = _GIB // 2  # of a loader's process, which has most of its memory in common with its rank
_SHM_ALWAYS = _GIB  # NCCL's own shared memory between a pod's GPUs, and semaphores
_SHM_UNKNOWN = 8 * _GIB  # where the data is not here: what the doctor recommends
_DISK_SPEED = 100e6  # bytes a second, of a shared folder that others use, too
_STEP = 60  # seconds for the step, or the batch of a validation, that a signal comes in
_LEAST_GRACE = 120


@dataclass(frozen=True)
class Needs:
    """The needs of a pod, but for `disk`: that is the run's."""

    memory: int
    shm: int
    disk: int
    grace: int
    """Seconds from SIGTERM to SIGKILL."""
    checkpoint: int


def needs(run: ExaminedRun, wanted: Wanted) -> Needs:
    """Returns the needs of a pod; `run` is as the doctor sees it, with `processes` those of a pod."""
    shm, activations, sample, why = _SHM_UNKNOWN, 0, None, "its samples can't be counted"
    try:
        fingerprint = run.fingerprint()
        run.micro_batch, run.workers = run.sizes()
        sample = int(fingerprint["train"]["bytes"]) if fingerprint else None
    except Exception as error:  # whatever somebody's data does where its files are missing; it is not fetched for this
        why = str(error).strip().partition("\n")[0] or type(error).__name__
    if sample is None:
        log.warning(
            "The data can't be looked at here: %s. So /dev/shm and memory are guessed: %s. Make this manifest where the data "
            "is, for better ones.",
            why, in_bytes(shm),
        )  # fmt: skip
    else:
        shm = _SHM_ALWAYS + 2 * run.shared_memory_needed(sample)
        activations = 0 if wanted.gpus else _activations(run)
    # The doctor reckons with one number that the optimiser keeps for each weight; Adam keeps two.
    checkpoint = run.checkpoint_bytes + run.gradient_bytes
    state = 0 if wanted.gpus else checkpoint + run.gradient_bytes
    rank = (_PROCESS_GPU if wanted.gpus else _PROCESS) + state + 2 * activations + run.workers * _WORKER
    memory = run.processes * rank + checkpoint + shm  # a checkpoint is written from a copy; /dev/shm counts as memory
    seconds = _STEP + 3 * checkpoint / _DISK_SPEED  # what is written before it, it itself, and it is read back
    return Needs(
        memory=_rounded(memory * 1.25),
        shm=_rounded(shm),
        disk=_rounded(2 * run.disk_needed + _GIB),  # curves, logs and reports lie beside the checkpoints
        grace=max(_LEAST_GRACE, 30 * math.ceil(seconds / 30)),
        checkpoint=checkpoint,
    )


def _rounded(number: float) -> int:
    """Rounds up to whole GiB."""
    return math.ceil(number / _GIB) * _GIB


def _activations(run: ExaminedRun) -> int:
    """Returns the bytes that a micro-batch keeps between the forward and the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run.compute(run.micro_batch)
    except Exception as error:  # a module that takes its steps by itself, say
        log.warning("What a micro-batch takes can't be found out here: %s. Look at the memory in the manifest.", error)
    return sum(kept.values())
