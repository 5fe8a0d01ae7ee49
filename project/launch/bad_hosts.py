"""Keeps a run away from hosts that have lost too many of its ranks, where it can't do without them at once: by its engine."""

import os
from collections.abc import Sequence
from pathlib import Path

from project.survive.requeue import REQUEUE, in_job_step

REPLACES_HOSTS = "PROJECT_REPLACES_HOSTS"
"""The environment variable that is set where the engine starts the ranks again on other hosts, when they have ended: Ray's
driver sets it, if there are others.
"""


def exclude(nodes: Sequence[str]) -> bool:
    """Has Slurm start this job without these nodes, by Slurm's names, when the run requeues it. Returns whether it will."""
    is_srun = in_job_step() and "TORCHELASTIC_RUN_ID" not in os.environ  # else the job is torchrun's, or Ray's
    return bool(nodes) and all(nodes) and is_srun and REQUEUE.exclude(nodes)


def requeue(newest: Path | None) -> bool:
    """Puts a job of Slurm back into the queue. Returns whether it is there. `newest`: the run's newest checkpoint."""
    REQUEUE.newest = lambda: newest
    return REQUEUE.requeue()
