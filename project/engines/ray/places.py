"""Ray Train: where the workers are placed, when they are started again, and with how many."""

import logging
from functools import partial
from typing import Any

import ray
import ray.train
import ray.util.scheduling_strategies  # the driver's
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from project.engines.ray.local import last_words
from project.engines.ray.verb import Asked
from project.engines.ray.worker import work
from project.errors import UserError

_EVERY = 30.0  # seconds from one look for more places to the next
_LONGEST = 300  # characters of what Ray says of an error


class Gently(WorkerGroupCallback):  # type: ignore[misc]
    """Before Ray ends workers to start another number of them, the training stops with a checkpoint: Ray gives it 5 s."""

    def __init__(self, office: Any, grace: float) -> None:
        self._office, self._grace = office, grace

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Ray's controller calls this for each end: also where a worker has failed, or all have ended themselves."""
        status = worker_group.get_latest_poll_status()
        if status is not None and status.errors:
            ray.get(self._office.lost.remote({rank: last_words(error)[:_LONGEST] for rank, error in status.errors.items()}))
            return
        if status is not None and status.finished:
            return
        ray.get(self._office.resizes.remote(self._grace))


def resources(ray: Any, asked: Asked) -> dict[str, float]:
    """What each worker needs."""
    there = ray.cluster_resources()
    gpus = asked.gpus if asked.gpus is not None else float(there.get("GPU", 0) >= 1)
    if gpus > there.get("GPU", 0) and asked.gpus is not None and asked.address is None:
        raise UserError(
            f"--gpus {gpus:g}: this machine has {there.get('GPU', 0):g}. HINT: --address of a Ray cluster that has."
        )
    return {name: value for name, value in (("CPU", asked.cpus), ("GPU", gpus)) if value}


def train(asked: Asked, office: Any, needs: dict[str, float], environment: dict[str, str]) -> None:
    """Returns when the ledger's decision is made, and all workers have ended."""
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    config = {
        **{"office": office, "words": asked.words, "run": asked.run, "cwd": str(asked.cwd), "grace": asked.grace},
        "checkpoints": str(asked.checkpoints),
    }
    elastic = asked.least < asked.workers
    DataParallelTrainer(
        partial(work, environment=environment),  # Ray's dashboard shows the config, and the environment may have keys
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=(asked.least, asked.workers) if elastic else asked.workers,
            use_gpu="GPU" in needs,
            resources_per_worker=needs,
            placement_strategy=asked.placement,
            elastic_resize_monitor_interval_s=_EVERY,
        ),
        run_config=ray.train.RunConfig(
            name="ray",
            storage_path=asked.storage or str(asked.folder),
            failure_config=ray.train.FailureConfig(max_failures=-1),  # the ledger counts
            callbacks=[Gently(office, asked.grace)],
            logging_config=ray.train.LoggingConfig(log_level="CRITICAL"),
        ),
    ).fit()
