"""Queries Slurm. Imports only the standard library: some queries come before anything else is loaded."""

import logging
import os
import re
import subprocess
from collections.abc import Mapping
from functools import cache

log = logging.getLogger(__name__)

_PATIENCE = 30  # seconds for an answer


def job_name(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the number of this job, or of a task of an array; both stay when Slurm requeues it."""
    if (array := environment.get("SLURM_ARRAY_JOB_ID")) is not None:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def slurm_node() -> str:
    """Returns Slurm's name of this host, which may be another than its own; '' outside of Slurm."""
    return os.environ.get("SLURMD_NODENAME", "")


@cache
def hostnames(names: str) -> list[str]:
    """Returns the nodes that a list of Slurm's names, 'n[1-3],m4'."""
    return (query("scontrol", "show", "hostnames", names) or "").split() if names else []


def field(name: str, shown: str | None) -> str:
    """Returns the value of a field that scontrol shows; '' where there is none."""
    match = re.search(rf"\b{name}=([^\s(]+)", shown or "")
    return match[1] if match else ""


def query(*words: str) -> str | None:
    """Returns what a command of Slurm prints; None where there is none (in a container, say), no answer came, or an error.

    Slurm sends its signals to a whole job step: SIGUSR1, which this program handles, ends a child. Then the query is repeated.
    """
    while True:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return done.stdout
        if done.returncode > 0:
            log.warning("%s: %s", " ".join(words), done.stderr.strip())
            return None
