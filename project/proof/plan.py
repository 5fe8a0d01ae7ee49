"""Shortens a run for `project prove`, and lists the trials of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from project.cluster.settings import flat
from project.config_files import option

_STEPS, _EPOCHS, _MICRO_BATCHES = 4, 2, 6  # six micro-batches are as many on each of 1, 2 and 3 ranks
_SAMPLES = 8  # in a micro-batch, at most
_VALIDATED = 5  # micro-batches, which two or three ranks cut in another way than one
RUN = "lightning_logs/prove"
FIRST = "first"


@dataclass(frozen=True)
class Trial:
    """The way in which a shortened run is trained, and what of it must equal another one."""

    name: str
    title: str
    ranks: tuple[int, ...] = (1,)
    """The number of ranks of each start: the last rank of all starts but the last one is killed."""
    kill: str = ""
    """The place where it is killed ('step', 'epoch', 'validation')."""
    like: str = FIRST
    """The trial that it is compared with."""
    words: tuple[str, ...] = ()
    kept: tuple[str, ...] = ("bits",)
    """The kinds of values that must be the same: 'bits', or 'samples', and 'losses' up to rounding."""
    skipped: str = ""
    """The reason why it is not tried."""

    @property
    def other_ranks(self) -> bool:
        """Returns whether it ends on another number of ranks than the trial that it is compared with."""
        return self.like == FIRST and self.ranks[-1] > 1


TRIALS = (
    Trial("twice", "the same again, in a new process"),
    Trial("again", "again from its first checkpoint"),
    Trial("step", "killed within an epoch, and resumed", (1, 1), "step"),
    Trial("epoch", "killed at an epoch's end, and resumed", (1, 1), "epoch"),
    Trial("validation", "killed in a validation, and resumed", (1, 1), "validation"),
    Trial("workers", "2 loader processes"),
    Trial("ranks-2", "on 2 ranks", (2,)),
    Trial("ranks-3", "on 3 ranks", (3,)),
    Trial("rank", "rank 1 of 2 killed, and resumed, as on 2 ranks", (2, 2), "step", "ranks-2"),
    Trial("resized", "killed on 2 ranks, and resumed on 3", (2, 3), "epoch"),
)


@dataclass(frozen=True)
class Plan:
    """The shortened run and its trials."""

    words: tuple[str, ...]
    on: Mapping[int, tuple[str, ...]]
    """More words, by the number of ranks."""
    steps: int
    trials: tuple[Trial, ...]
    coarse: bool
    """Numbers have 16 bits."""
    summary: str
    samples: int | None
    """The number of samples of the training set that are read, so that an epoch ends with a shorter step; None: all of them."""


def alone(words: Sequence[str], settings: Mapping[str, object]) -> list[str]:
    """Returns the options of a trial: it ends by its steps, writes to its own folder, and connects to no server.

    A number of threads that the command's words or the settings of its YAML name is kept: a sum's last bits may go by it.
    """
    trainer = {
        **{"num_nodes": 1, "logger": "true", "max_time": "null", "max_steps": -1, "min_epochs": "null", "min_steps": "null"},
        **{"check_val_every_n_epoch": 1, "log_every_n_steps": 1, "overfit_batches": 0, "fast_dev_run": "false"},
        **{"enable_checkpointing": "true", "fingerprints": "true", "limit_val_batches": _VALIDATED},
    }
    if option([*words], "--trainer.accelerator") is None:
        trainer["accelerator"] = "cpu"
    if option([*words], "--trainer.threads") is None and settings.get("trainer.threads") in (None, "auto"):
        trainer["threads"] = 1
    return [
        *(f"--trainer.{key}={value}" for key, value in trainer.items()),
        *("--checkpoints.every_n_steps=1", "--checkpoints.every_n_minutes=.inf", "--checkpoints.keep_last=1000"),
        "--checkpoints.copy_to=null",
        *("--trainer.callbacks+=project.proof.recorder.Recorder", "--run=prove"),
    ]


def shortened(base: Sequence[str], facts: Mapping[str, int | None], config: Mapping[str, object]) -> Plan:
    """Returns a plan: the number and the size of the steps, and the possible trials.

    `facts`: what the first micro-batch has shown (`recorder.py`); `config`: the resolved configuration.
    """
    trainer, data = (cast(Mapping[str, object], config.get(section) or {}) for section in ("trainer", "data"))
    keys, exact = flat(config), bool(trainer.get("exact"))
    images = "class_path" not in data
    prefix, section = ("data.", "data") if images else ("data.init_args.", "trainer")
    size, samples, automatic = facts["micro_batch"], facts["samples"], facts["automatic"]
    sized, words = f"{prefix}batch_size" in keys and bool(size), []
    many = _MICRO_BATCHES if automatic and size else 1
    if size and many > 1:
        if sized and size > _SAMPLES:
            size = _SAMPLES
            words += [f"--{prefix}batch_size={size}"]
        words += [f"--{section}.global_batch_size={many * size}", "--trainer.accumulate_grad_batches=auto"]
    elif size and sized:
        size = max(_MICRO_BATCHES, size - size % _MICRO_BATCHES)
        words += [f"--{prefix}batch_size={size}", f"--{section}.global_batch_size={size}"]
    steps = _STEPS if samples is None or size is None else min(_STEPS, max(1, samples // (many * size)))
    epochs = _EPOCHS if steps > 2 else _EPOCHS + 1
    between = max(1, steps // 2)
    words += [
        f"--trainer.limit_train_batches={steps}",
        f"--trainer.max_epochs={epochs}",
        f"--trainer.val_check_interval={between}",
    ]
    workers = f"{prefix}num_workers"
    words += [f"--{workers}=0"] if workers in keys else []
    cut = None
    if size and size >= 4 and samples and samples > steps * many * size and facts["ends"] and steps > 1:
        cut = (steps - 1) * many * size + many * size // 2 + 1
    batch = "" if size is None else f" of {many} micro-batch{'es' * (many > 1)} of {size}"
    summary = (
        f"A shortened run: {epochs} epochs, in each {steps} step{'s' * (steps > 1)}{batch}, and a validation after every "
        f"{between}.\nOn other numbers of ranks: {'to the last bit' if exact else 'up to rounding, as trainer.exact is off'}."
    )
    on: dict[int, tuple[str, ...]] = {}
    if not automatic:
        for ranks in (2, 3):
            limit = f"--trainer.limit_val_batches={_VALIDATED * ranks}"
            on[ranks] = (f"--{prefix}batch_size={(size or 0) // ranks}", limit)
    unsized = "" if size is not None and (automatic or sized) else "nothing here says how large a micro-batch is"
    skipped = {
        "validation": "" if facts["validates"] else "nothing is validated",
        "workers": "" if workers in keys else f"there is no key {workers}",
        **dict.fromkeys(("ranks-2", "ranks-3", "rank"), unsized),
        "resized": unsized
        or ("" if automatic else "with manual optimisation batch_size is another one there, and so it is another run"),
    }
    kept = ("bits",) if exact else ("samples", "losses") if automatic else ("samples",)
    what = "" if exact else f": {' and '.join(kept)}"
    trials = []
    for trial in TRIALS:
        why = skipped.get(trial.name, "")
        if facts["gpus"] is not None and max(trial.ranks) > facts["gpus"]:
            why = why or f"needs {max(trial.ranks)} GPUs"
        if trial.other_ranks:
            trial = replace(trial, title=f"{trial.title}{what}", kept=kept)
        more = (f"--{workers}=2",) if trial.name == "workers" else ()
        trials.append(replace(trial, words=more, skipped=why))
    coarse = "16" in str(trainer.get("precision"))
    return Plan((*base, *words), on, steps, tuple(trials), coarse, summary, cut)
