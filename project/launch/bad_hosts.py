"""Keeps a run away from hosts that have lost too many of its ranks, where it can't do without them at once: by its engine."""

import os
from collections.abc import Sequence
from pathlib import Path

from project.cluster.place import node_of
from project.survive.requeue import REQUEUE, in_job_step

REPLACES_HOSTS = "PROJECT_REPLACES_HOSTS"
"""The environment variable that is set where the engine starts the ranks again on other hosts, when they have ended: Ray's
driver sets it, if there are others.
"""


def keep_away(hosts: Sequence[str]) -> str:
    """Has Slurm exclude hosts when it requeues the job. Returns that, or what the user can do, in a sentence; '' if nothing."""
    nodes = [node_of(host) for host in hosts]
    if nodes and in_job_step():
        return REQUEUE.exclude(nodes)
    if nodes and "KUBERNETES_SERVICE_HOST" in os.environ:
        return f"HINT: kubectl cordon {' '.join(nodes)} keeps new pods from there (or a nodeAffinity in the manifest)."
    return ""


def requeue_without(hosts: Sequence[str], newest: Path | None) -> bool:
    """Puts a job of Slurm back into the queue, to be started without these hosts. Returns whether it is in the queue.

    `newest`: the run's newest checkpoint. A job that comes to none is not put back for ever.
    """
    if not hosts or not in_job_step():
        return False
    REQUEUE.newest = lambda: newest
    return REQUEUE.requeue()
