"""The requirements of a manifest: what can't work is refused here, by name, and not by a cluster an hour later; a pod's needs,
which are the doctor's figures for the run and what is added to them, in bytes and seconds; and the container's command line.
"""

import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import yaml
from torch import Tensor

from project.config_files import CONFIGS, without
from project.doctor.examined import ExaminedRun
from project.doctor.findings import in_bytes
from project.errors import UserError

log = logging.getLogger(__name__)

Engine = Literal["k8s", "trainjob"]

APP = Path("/app")  # the code in the image, and where a run is started
_LONGEST = 48  # of 63 letters of a run's name; the pods add to it: '-node-0-1234' and more
_GIB = 1 << 30
# In main memory, by process: torch and what comes with it; with a GPU, also what the driver and NCCL keep there.
_PROCESS, _PROCESS_GPU = 3 * _GIB // 2, 4 * _GIB
_WORKER = _GIB // 2  # of a loader's process, which has most of its memory in common with its rank
_SHM_ALWAYS = _GIB  # NCCL's own shared memory between a pod's GPUs, and semaphores
_SHM_UNKNOWN = 8 * _GIB  # where the data is not here: what the doctor recommends
_DISK_SPEED = 100e6  # bytes a second, of a shared folder that others use, too
_STEP = 60  # seconds for the step, or the batch of a validation, that a signal comes in
_LEAST_GRACE = 120
_OWN = ("--engine", "--nodes", "--gpus", "--cpus", "--image", "--claim", "--out", "--run")  # of the verb `manifest`
_IN_IMAGE = CONFIGS.resolve()


@dataclass(frozen=True)
class Wanted:
    """The user's request for a manifest, and what follows from it alone."""

    engine: Engine
    run: str
    least: int
    """Pods with which the run goes on."""
    most: int
    """Pods that the cluster is asked for."""
    gpus: int
    cpus: int
    """Of a pod."""
    image: str
    claim: str | None
    """Of an existing volume for the runs; None: the manifest makes one."""
    words: list[str]
    """After `python -m project fit`, but for the run's name."""
    configs: dict[str, str]
    """Those that are not in the image, by name."""
    root: Path
    """In the container: the folder in which lightning_logs lies."""

    @property
    def processes(self) -> int:
        """Returns the processes in a pod: one for each GPU, or one."""
        return max(1, self.gpus)

    @property
    def runs(self) -> Path:
        """Returns the folder in the container that holds the runs."""
        return self.root / "lightning_logs"


def _match(pattern: str, value: str, text: str) -> str:
    """Returns the value if it matches; otherwise raises a UserError."""
    if re.fullmatch(pattern, value, re.ASCII) is None:
        raise UserError(text)
    return value


def pods(nodes: str, engine: Engine) -> tuple[int, int]:
    """Returns the least and the most number of pods: '4' or '2:4'."""
    wrong = f"--nodes {nodes}: a number of pods, or MIN:MAX. HINT: --nodes 4, or --nodes 2:4."
    least, colon, most = _match(r"[1-9]\d*(:\d+)?", nodes, wrong).partition(":")
    if colon and engine == "trainjob":
        raise UserError(
            f"--nodes {nodes}: a TrainJob's number of pods is fixed (Kubeflow Trainer v2 has no elastic jobs). HINT: "
            "--engine k8s, whose pods come and go; or one number."
        )
    if int(most or least) < int(least):
        raise UserError(wrong)
    return int(least), int(most or least)


def name(run: str) -> str:
    """Returns the run's name, if pods and services can have it, too."""
    nearest = re.sub(r"[^a-z0-9]+", "-", run.lower())[:_LONGEST].strip("-").lstrip("0123456789-") or "nightly"
    return _match(
        rf"(?=.{{1,{_LONGEST}}}$)[a-z]([-a-z0-9]*[a-z0-9])?", run,
        f"The run's name {run!r} can't be that of a Kubernetes service: small letters, digits and '-', a letter first, at most "
        f"{_LONGEST}. HINT: --run {nearest}",
    )  # fmt: skip


def image_of(image: str | None) -> str:
    """Returns the image; warns of one that may be another tomorrow."""
    if image is None:
        raise UserError(
            "Nothing says which image the pods are to run. HINT: --image REPOSITORY@sha256:DIGEST; docs/containers.md says how "
            "to build one."
        )
    _match(
        r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", image,
        f"--image {image}: that is no image's name. HINT: REPOSITORY@sha256:DIGEST, the digest's 64 digits.",
    )  # fmt: skip
    if "@" not in image:
        log.warning(
            "--image %s has no digest: pods that are started later may run other code, in the same run. HINT: "
            "REPOSITORY@sha256:DIGEST, which the push has printed.",
            image,
        )
    return image


def claim_of(claim: str | None) -> str | None:
    """Returns the volume claim's name, if it is a valid one."""
    wrong = f"--claim {claim!r}: no claim can be called so. HINT: small letters, digits, '-' and '.', 253 at most."
    return None if claim is None else _match(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", claim, wrong)


def root_of(folder: str | Path | None) -> Path:
    """Returns the folder in the container in which lightning_logs lies, if a volume can be mounted there."""
    wrong = (
        f"trainer.default_root_dir={str(folder)!r}: no volume can be put there in a container. HINT: a path of letters, "
        "digits, '-', '_' and '.', without '..'."
    )
    return Path(_match(r"(?!.*/\.\.(/|$))/[-\w./]*", str(APP / (folder or ".")), wrong))


def refuse_odd_batches(wanted: Wanted, run: ExaminedRun) -> None:
    """Raises an error if a possible number of pods can't make the global batch."""
    global_batch, micro_batch, key = run.global_batch, run.micro_batch, run.global_batch_key
    if global_batch is None:
        log.warning(
            "Nothing says how large a global batch is: it will be micro-batch x ranks, another one for each number of pods. "
            "HINT: set %s.",
            key,
        )
        return
    at_once = micro_batch * max(1, wanted.processes // run.shared_by)
    counts = range(wanted.least, wanted.most + 1)
    odd = [str(count) for count in counts if global_batch % (at_once * count)]
    if not odd:
        return
    fitting = [str(count) for count in range(1, global_batch // at_once + 1) if global_batch % (at_once * count) == 0]
    numbers = f"--nodes of {', '.join(fitting)} can" if fitting else "no number of them can"
    choice = "choose one of these, or " if fitting else ""
    shares = math.lcm(*(at_once * count for count in counts))
    raise UserError(
        f"{' or '.join(odd)} pod(s) of {wanted.processes} process(es) with micro-batches of {micro_batch} can't make "
        f"a global batch of {global_batch}; {numbers}. HINT: {choice}set {key}="
        f"{max(1, round(global_batch / shares)) * shares}."
    )


# A pod's needs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """The needs of a pod, but for `disk`: that is the run's."""

    memory: int
    shm: int
    disk: int
    grace: int
    """Seconds from SIGTERM to SIGKILL."""


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


# The command line in the container: configs that are not in the image travel with the manifest -----------------------


def command(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments of the verb `fit`, and the configs, by name, that `--config=:NAME` refers to.

    `argv`: after the verb `manifest`, with configs expanded to those that they stand on.
    """
    configs: dict[str, str] = {}
    rest = iter(without(argv, *_OWN))
    return [_config(Path(next(rest)), configs) if argument == "--config" else argument for argument in rest], configs


def _config(path: Path, configs: dict[str, str]) -> str:
    if path.resolve().parent == _IN_IMAGE:
        return f"--config=configs/{path.name}"
    text = path.read_text()
    if not re.fullmatch(r"[-._a-zA-Z0-9]+", path.name) or configs.get(path.name) not in (None, text):
        raise UserError(
            f"{path} travels with the manifest, under its name. HINT: another one, of letters, digits, '-', '.' and '_'."
        )
    configs[path.name] = text
    bases = (yaml.safe_load(text) or {}).get("base") or []
    for base in [bases] if isinstance(bases, str) else bases:
        beside = (path.parent / base).resolve()
        if beside.is_file() and beside.parent != _IN_IMAGE and base != beside.name:
            raise UserError(
                f"{path} stands on {base}, and both travel with the manifest, in one folder. HINT: put it beside {path}."
            )
    return f"--config=:{path.name}"
