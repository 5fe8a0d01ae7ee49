"""Checks whether this cluster is fit for this run, and if not, where the fault lies: `python -m project doctor --config
...`."""

import signal
import time
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from rich.console import Console

from project.cluster.connection import meet
from project.cluster.place import host
from project.doctor import hosts, links, training
from project.doctor.examined import examined_run
from project.doctor.findings import Examination, Finding, show, write
from project.typed import TypedTrainer


def doctor(
    trainer: TypedTrainer,
    model: LightningModule,
    datamodule: LightningDataModule | None = None,
    fast: bool = False,
    join_timeout: float = 30.0,
) -> list[Finding]:
    """Examines the cluster: is it fit for this run? The findings are complete on rank 0, and lie in doctor.json.

    Args:
        trainer: the Trainer of the run.
        model: the model of the run.
        datamodule: its data; None: the module has loaders itself.
        fast: leave out what takes time: how fast network, device and loader are, and the memory.
        join_timeout: seconds to wait for all ranks; who is missing then is named.
    """
    launcher, given = trainer.strategy.launcher, (trainer, model, datamodule, fast, join_timeout)
    try:
        findings = _examine(*given) if launcher is None else launcher.launch(_examine, *given, trainer=trainer)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever presses it again need not
        if launcher is not None:
            launcher.kill(signal.SIGKILL)  # the ranks that this process has started
        raise SystemExit(1) from None
    return list(findings)


def _examine(
    trainer: TypedTrainer, model: LightningModule, data: LightningDataModule | None, fast: bool, seconds: float
) -> list[Finding]:
    """Runs the examination in each rank, shows its findings, and writes them."""
    start = time.monotonic()
    try:
        rendezvous, route = meet(trainer, seconds) if trainer.world_size > 1 else (None, None)
    except ValueError as error:
        text, _, fix = str(error).partition(" HINT: ")
        findings = [Finding("ranks", "bad", text, fix, [{"rank": trainer.global_rank, "host": host()}])]
    else:
        folder = trainer.strategy.broadcast(str(trainer.default_root_dir)) if rendezvous else trainer.default_root_dir
        on_this_host = rendezvous.hosts.count(rendezvous.hosts[trainer.global_rank]) if rendezvous else 1
        with examined_run(trainer, model, data, Path(folder), on_this_host) as run:
            examination = Examination(run, rendezvous, route, fast)
            examine(examination)
        findings = examination.findings
    if trainer.is_global_zero or not dist.is_initialized():
        show(findings, Console(stderr=True))
    if trainer.is_global_zero:
        write(findings, Path(trainer.default_root_dir) / "doctor.json", time.monotonic() - start)
    return findings


def examine(this: Examination) -> None:
    """Runs all checks, in the order in which one needs the results of another."""
    hosts.versions(this)
    hosts.hardware(this)
    hosts.gpus(this)
    links.interfaces(this)
    training.data(this)
    hosts.run_folder(this)
    hosts.limits(this)
    hosts.clocks(this)
    links.collectives(this)
    if this.fast:
        return
    links.speed(this)
    if not this.has_data:
        return
    step = training.compute(this)
    if step is not None:
        training.memory(this)
        links.gradient_sync(this, step)
    training.loader(this, step)
