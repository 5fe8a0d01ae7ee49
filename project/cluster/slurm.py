"""Queries Slurm. Imports only the standard library: some queries come before anything else is loaded."""

import os
import subprocess
from collections.abc import Mapping

_PATIENCE = 30  # seconds for an answer


def job_name(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the number of this job, or of a task of an array; both stay when Slurm requeues it."""
    if (array := environment.get("SLURM_ARRAY_JOB_ID")) is not None:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def slurm_node() -> str:
    """Returns Slurm's name of this host, which may be another than its own; '' outside of Slurm."""
    return os.environ.get("SLURMD_NODENAME", "")


def scontrol(*words: str) -> subprocess.CompletedProcess[str] | None:
    """Returns the result of scontrol; None where there is none (in a container, say) or no answer came."""
    return query("scontrol", *words)


def query(*words: str) -> subprocess.CompletedProcess[str] | None:
    """Returns the result of a command of Slurm; None where there is none, or no answer came.

    Slurm sends its signals to a whole job step: SIGUSR1, which this program handles, ends a child. Then the query is repeated.
    """
    while True:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode >= 0:
            return done
