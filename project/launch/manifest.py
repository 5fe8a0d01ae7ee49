"""The requirements of a manifest: what can't work is refused here, by name, and not by a cluster an hour later."""

import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from project.doctor.examined import ExaminedRun
from project.errors import UserError

log = logging.getLogger(__name__)

Engine = Literal["k8s", "trainjob"]

APP = Path("/app")  # the code in the image, and where a run is started
_LONGEST = 48  # of 63 letters of a run's name; the pods add to it: '-node-0-1234' and more


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
    """Returns the value if it matches; else a user is told so."""
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
    shares = math.lcm(*(at_once * count for count in counts))
    raise UserError(
        f"{' or '.join(odd)} pod(s) of {wanted.processes} process(es) with micro-batches of {micro_batch} can't make "
        f"a global batch of {global_batch}; {numbers}. HINT: choose one of these, or set {key}="
        f"{max(1, round(global_batch / shares)) * shares}."
    )
