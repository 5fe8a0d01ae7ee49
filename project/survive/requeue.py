"""Puts a job back into Slurm's queue: in time, and not for ever.

SIGUSR1 comes some seconds before Slurm ends the job (--signal=USR1@60, or a partition's GraceTime when it is preempted).
Where a checkpoint, a step or the start-up takes longer than that, the job goes back as it is, shortly before its end, with the
newest checkpoint that is there. A job that came back several times and has made no new checkpoint is not put back again.

No other import than the standard library's: this waits from the first moment of the program on.
"""

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from project.cluster.slurm import field, hostnames, job_name, query
from project.survive.signals import SIGNALS
from project.untrusted import open_to_append, read_text

log = logging.getLogger(__name__)

MOST = 3  # starts in a row without a new checkpoint; scripts/slurm.sbatch counts in the same file
_IN_USE = "(idle|alloc|mix|comp)[~#]?"  # states of a node that works, or is started when it is needed
_UNCONNECTED = 3.0  # seconds in which the main thread may end by itself: torchrun's agent waits for ten times as long
_MARGIN = 10.0  # seconds before the end, or a quarter of what is left where that is less


def in_job_step() -> bool:
    """Returns whether this process runs in a step of a Slurm job (srun)."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" in os.environ


def _seconds_left() -> float | None:
    """Returns the seconds until Slurm ends this job, where it reports them."""
    with suppress(ValueError):  # 'Unknown', or nothing
        end = datetime.fromisoformat(field("EndTime", query("scontrol", "show", "job", os.environ["SLURM_JOB_ID"])))
        return (end - datetime.now()).total_seconds()
    return None


def _has_others(nodes: Sequence[str]) -> bool:
    """Returns whether the job's partition has enough nodes that work and are like these, beside them: the job would wait for
    others without an end.
    """
    job = query("scontrol", "show", "job", job_name())
    if field("BatchFlag", job) in ("", "0") or field("Requeue", job) != "1" or field("ReqNodeList", job):
        return False
    shown = query("sinfo", "--noheader", "--Node", f"--partition={field('Partition', job)}", "--format=%N|%t|%G|%c|%m|%f")
    rows = [line.strip().split("|", 2) for line in (shown or "").splitlines() if line.count("|") > 1]
    kinds = {kind for name, _, kind in rows if name in nodes}
    excluded = {*nodes, *hostnames(field("ExcNodeList", job))}
    others = {name for name, state, kind in rows if kind in kinds and re.fullmatch(_IN_USE, state)} - excluded
    return len(others) >= int(field("NumNodes", job).partition("-")[0] or 1)


def grace_period() -> tuple[float, str] | None:
    """Returns the grace period in seconds, and the setting that lengthens it; None where it is not known in advance."""
    if in_job_step():
        script = query("scontrol", "write", "batch_script", os.environ["SLURM_JOB_ID"], "-") or ""
        match = re.search(r"^#SBATCH\s+--signal[= ]\S*@(\d+)", script, re.MULTILINE)
        return (float(match[1]), "#SBATCH --signal=USR1@{}") if match else None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT={}"
    return None


class Requeue:
    """Puts this job back into the queue, once; on rank 0."""

    def __init__(self) -> None:
        self.newest: Callable[[], Path | None] = lambda: None
        """The newest checkpoint, from who knows it."""
        self.doing: Callable[[], str] = lambda: "the start-up"
        self._lock, self._over = threading.Lock(), threading.Event()
        self._put = False

    def begin_countdown(self, number: signal.Signals) -> None:
        """Starts a thread that requeues the job shortly before its end, if this signal announces the end."""
        if number == signal.SIGUSR1 and in_job_step() and os.environ.get("SLURM_PROCID") == "0":
            threading.Thread(target=self._requeue_before_end, name="requeue", daemon=True).start()

    def _requeue_before_end(self) -> None:
        """Requeues the job shortly before its end, unless `requeue` was called before."""
        left = _seconds_left()
        if left is None or self._over.wait(left - max(2.0, min(_MARGIN, left / 4))):
            return
        log.warning(
            "SIGUSR1 came %.0f s before the end of Slurm job %s, and %s takes longer: it is cut short. HINT: an earlier "
            "signal, #SBATCH --signal=USR1@%.0f", left, job_name(), self.doing(), max(60, 4 * left),
        )  # fmt: skip
        if not self.requeue() and not self.given_up:
            os._exit(128 + signal.SIGUSR1)  # no scontrol here: who started us knows what that means

    @property
    def _marks(self) -> Path:
        """Returns the path of the file that names the newest checkpoint at each requeueing, a line for each."""
        return Path("lightning_logs") / f".requeues-{os.environ['SLURM_JOB_ID']}"

    @property
    def _excluded(self) -> Path:
        """Returns the path of the file with the nodes on which the job is not to be started again, a line for each."""
        return Path("lightning_logs") / f".excluded-{os.environ['SLURM_JOB_ID']}"

    def exclude(self, nodes: Sequence[str]) -> bool:
        """Has Slurm start the job without these nodes (Slurm's names) when it is requeued, where enough others are like
        them. Returns whether it will; not in a container, which has no scontrol.
        """
        is_srun = in_job_step() and "TORCHELASTIC_RUN_ID" not in os.environ  # else the job is torchrun's, or Ray's
        if not nodes or not all(nodes) or not is_srun or not _has_others([*self._recorded(), *nodes]):
            return False
        with suppress(OSError):
            self._excluded.parent.mkdir(exist_ok=True)
            with open_to_append(self._excluded) as file:
                file.write("".join(f"{node}\n" for node in nodes))
            return True
        return False

    def _recorded(self) -> list[str]:
        """Returns the nodes on which the job is not to be started again."""
        with suppress(OSError):
            return [name for name in read_text(self._excluded).split() if re.fullmatch(r"[\w.-]+", name)]
        return []

    def _exclude_nodes(self) -> None:
        """Adds nodes to those that the job is not started on; Slurm allows that while the job is in the queue."""
        nodes = self._recorded()
        if nodes and _has_others(nodes):
            given = hostnames(field("ExcNodeList", query("scontrol", "show", "job", job_name())))
            query("scontrol", "update", f"JobId={job_name()}", f"ExcNodeList={','.join(sorted({*nodes, *given}))}")

    def requeue_elsewhere(self) -> None:
        """Puts the job back into the queue, to be started without the nodes that are excluded: each node goes once."""
        query("scontrol", "requeue", job_name())  # for two nodes at once, one call is refused
        self._exclude_nodes()

    given_up = False

    def requeue(self) -> bool:
        """Puts the job back into the queue, once, unless it makes no progress; returns whether it is in the queue."""
        self._over.set()
        with self._lock:
            if self._put or self.given_up or not in_job_step():
                return self._put
            marks = ["none"]
            with suppress(OSError):
                marks += read_text(self._marks).split()
            newest = self.newest()
            mark = newest.name if newest else marks[-1]
            if marks[-MOST:] == [mark] * MOST:
                self.given_up = True
                log.error(
                    "Slurm job %s is NOT put back into the queue: it was started %d times and came to no new checkpoint. HINT: "
                    "a longer --time, an earlier or later --signal=USR1@SECONDS, or checkpoints.every_n_minutes lower.",
                    job_name(), MOST,
                )  # fmt: skip
                return False
            with suppress(OSError):
                self._marks.parent.mkdir(exist_ok=True)
                with open_to_append(self._marks) as file:
                    file.write(f"{mark}\n")
            self._put = query("scontrol", "requeue", job_name()) is not None
            if self._put:
                self._exclude_nodes()
        if self._put:
            log.info("Slurm job %s is back in the queue%s.", job_name(), f" and will resume from {newest}" if newest else "")
        return self._put

    def remove_count_file(self) -> None:
        """Removes what the job has noted for its next start, in a job step: the run is finished."""
        if in_job_step():
            self._marks.unlink(missing_ok=True)
            self._excluded.unlink(missing_ok=True)


REQUEUE = Requeue()
"""This process's job."""


def _exit_unconnected() -> None:
    """Exits where this rank still waits to be connected, in code that is not Python's: rank 0 has ended, and said why."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and not distributed.is_initialized():
        os._exit(1)


def listen_for_signals() -> None:
    """Notes the signals that end this process, from here on, and reports the first to the supervisor, where there is one: it
    starts no rank again then. A second one ends the process at once.
    """
    from project.launch.fork_server import tell_supervisor  # which loads this file

    def at_first(number: signal.Signals) -> None:
        tell_supervisor(signal=number)
        REQUEUE.begin_countdown(number)
        if number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
            timer = threading.Timer(_UNCONNECTED, _exit_unconnected)
            timer.daemon = True
            timer.start()

    SIGNALS.at_first = at_first
    SIGNALS.listen(signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    SIGNALS.exit_at_second_signal()
