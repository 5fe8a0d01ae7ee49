"""Shortens a run for `project prove`, and lists what is tried with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from project.cluster.settings import flat
from project.config_files import option

NAMES = ("twice", "step", "epoch", "validation", "workers", "ranks-2", "ranks-3")
_STEPS, _EPOCHS, _MICRO_BATCHES = 4, 2, 6  # six micro-batches are as many on each of 1, 2 and 3 ranks
_SAMPLES = 8  # in a micro-batch, at most
_VALIDATED = 6  # micro-batches


@dataclass(frozen=True)
class Trial:
    """How a shortened run is trained, and what of it must be as in the first one."""

    name: str
    title: str
    words: tuple[str, ...] = ()
    ranks: int = 1
    kill: str = ""
    again: bool = False
    """Once more from its first checkpoint, when it has ended."""
    kept: tuple[str, ...] = ("bits",)
    skipped: str = ""
    """Why it is not tried."""


@dataclass(frozen=True)
class Plan:
    """The shortened run."""

    words: tuple[str, ...]
    steps: int
    trials: tuple[Trial, ...]
    coarse: bool
    summary: str


def alone(words: Sequence[str]) -> list[str]:
    """A trial ends by its steps, writes to its own folder, and talks to no server."""
    trainer = {
        **{"num_nodes": 1, "logger": "true", "max_time": "null", "max_steps": -1, "min_epochs": "null", "min_steps": "null"},
        **{"check_val_every_n_epoch": 1, "log_every_n_steps": 1, "overfit_batches": 0, "fast_dev_run": "false"},
        **{"enable_checkpointing": "true", "fingerprints": "true", "threads": 1, "limit_val_batches": _VALIDATED},
    }
    if option([*words], "--trainer.accelerator") is None:
        trainer["accelerator"] = "cpu"
    return [
        *(f"--trainer.{key}={value}" for key, value in trainer.items()),
        *("--checkpoints.every_n_steps=1", "--checkpoints.every_n_minutes=.inf", "--checkpoints.keep_last=1000"),
        *("--trainer.callbacks+=project.proof.recorder.Recorder", "--run=prove"),
    ]


def shortened(base: Sequence[str], facts: dict[str, Any], config: dict[str, Any]) -> Plan:
    """Chooses how many steps there are, of which size, and what can be tried.

    Args:
        base: the words of the command.
        facts: what the first micro-batch has shown.
        config: the resolved configuration.
    """
    keys, exact = flat(config), bool(config["trainer"].get("exact"))
    images = "class_path" not in (config.get("data") or {})
    prefix = "data." if images else "data.init_args."
    size, samples, automatic = facts["micro_batch"], facts["samples"], facts["automatic"]
    sized, words = f"{prefix}batch_size" in keys and bool(size), []
    many = _MICRO_BATCHES if automatic and size else 1
    if many > 1:
        if sized and size > _SAMPLES:
            size = _SAMPLES
            words += [f"--{prefix}batch_size={size}"]
        words += [
            f"--{'data' if images else 'trainer'}.global_batch_size={many * size}",
            "--trainer.accumulate_grad_batches=auto",
        ]
    elif sized:
        size = max(_MICRO_BATCHES, size - size % _MICRO_BATCHES)
        words += [f"--{prefix}batch_size={size}"]
    steps = _STEPS if samples is None or size is None else min(_STEPS, max(1, samples // (many * size)))
    epochs = _EPOCHS if steps > 2 else _EPOCHS + 1
    between = max(1, steps // 2)
    words += [
        f"--trainer.limit_train_batches={steps}",
        f"--trainer.max_epochs={epochs}",
        f"--trainer.val_check_interval={between}",
    ]
    workers = f"{prefix}num_workers"
    if workers in keys:
        words += [f"--{workers}=0"]
    trials = _trials(exact, facts["validates"], automatic, sized, workers if workers in keys else "", prefix, size)
    batch = "" if size is None else f" of {many} micro-batch{'es' * (many > 1)} of {size}"
    kind = "to the last bit" if exact else "up to rounding, as trainer.exact is off"
    summary = (
        f"A shortened run: {epochs} epochs, in each {steps} step{'s' * (steps > 1)}{batch}, and a validation after every "
        f"{between}.\nOn other numbers of ranks: {kind}."
    )
    coarse = "16" in str(config["trainer"].get("precision"))
    return Plan((*base, *words), steps, trials, coarse, summary)


def _trials(
    exact: bool, validates: bool, automatic: bool, sized: bool, workers: str, prefix: str, size: int | None
) -> tuple[Trial, ...]:
    kept: tuple[str, ...] = ("bits",) if exact else ("samples", "losses") if automatic else ("samples",)
    unseen, single = "" if validates else "nothing is validated", "" if workers else f"there is no key {prefix}num_workers"
    why = "" if size is not None and (automatic or sized) else "nothing here says how large a micro-batch is"
    on = [
        Trial(
            f"ranks-{ranks}",
            f"on {ranks} ranks{'' if exact else ': ' + ' and '.join(kept)}",
            ()
            if automatic or why
            else (f"--{prefix}batch_size={(size or 0) // ranks}", f"--trainer.limit_val_batches={_VALIDATED * ranks}"),
            ranks,
            kept=kept,
            skipped=why,
        )
        for ranks in (2, 3)
    ]
    return (
        Trial("twice", "the same again", again=True),
        Trial("step", "killed within an epoch, and resumed", kill="step"),
        Trial("epoch", "killed at an epoch's end, and resumed", kill="epoch"),
        Trial("validation", "killed in a validation, and resumed", kill="validation", skipped=unseen),
        Trial("workers", "2 loader processes", (f"--{workers}=2",), skipped=single),
        *on,
    )  # fmt: skip
