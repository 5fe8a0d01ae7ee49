"""A run has a name and a folder of its own, lightning_logs/NAME; whoever names a run that exists resumes it.

What makes it this run and no other stands in one table, `KINDS`, which docs/keys.md repeats. Only rank 0 decides here; the
others receive its decision.
"""

import errno
import fcntl
import logging
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from itertools import count
from pathlib import Path
from typing import Literal, cast

import yaml

from project.checkpoints.reading import (
    Manifest,
    check_complete,
    checkpoints_in,
    is_url,
    manifest_of,
    memory_folder,
    new_folder,
    newest_good,
    newest_in_memory,
    read_manifest,
    set_aside_later,
    step_of,
    whole_manifest,
)
from project.cluster.place import restarts
from project.cluster.settings import differing, flat, of_the_same_classes
from project.config_files import RUNS, folder_of
from project.errors import FaultError, UserError
from project.launch.launcher import Launch
from project.launch.orphans import launcher_pid
from project.masking import masked
from project.step.monitored import chosen_metric
from project.untrusted import dump_yaml, read_text, read_yaml, shortened, write_text
from project.watch.fingerprint_file import FILE as FINGERPRINTS
from project.watch.history import FILE, lives_of

log = logging.getLogger(__name__)

_STARTED = "PROJECT_STARTED"
_BEFORE_ANY_STEP = (".lock", "log.txt", "config.yaml", FILE, FINGERPRINTS)
"""The files of a run that has not taken a step."""
_TRAINERS = count(1)  # of this program that were given no folder

Kind = Literal["free", "said", "word", "never"]


def _trainer(names: str) -> list[str]:
    return [f"trainer.{name}" for name in names.split()]


# A key stands for all that is below it (model.optimizer for model.optimizer.init_args.lr); the longest one that fits counts.
_TABLE: dict[Kind, list[str]] = {
    # A longer run, how often it is looked at and saved, and where and how it is computed.
    "free": [
        *_trainer("max_epochs min_epochs max_steps min_steps max_time"),
        *_trainer("val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps limit_val_batches"),
        *_trainer("limit_test_batches limit_predict_batches enable_checkpointing enable_progress_bar enable_model_summary"),
        *_trainer("accelerator strategy devices num_nodes accumulate_grad_batches join_timeout default_root_dir"),
        *_trainer("logger profiler plugins detect_anomaly deterministic benchmark inference_mode nonfinite capture barebones"),
        *_trainer("fast_dev_run enable_autolog_hparams model_registry shared_folder fingerprints ranks_differ"),
        *("data.num_workers", "data.init_args.num_workers", "data.resident", "data.on_error", "data.source.init_args.download"),
        *("model.channels_last", "model.compile", "checkpoints", "watchdog", "recover", "profile", "dashboard"),
        *("notify", "metrics"),
        *("run", "resume", "change", "doctor", "dry_run", "debug", "base", "weights_only"),
    ],
    # What may, and need not, have a say in the result.
    "said": ["trainer.callbacks"],
    # What is learned from here on.
    "word": [
        *("model.optimizer", "model.lr_scheduler", "model.lr_reference_batch", "model.lr_scaling", "model.lr_interval"),
        *("model.init_args", "model.label_smoothing", "data.crop_padding", "data.flip", "data.source.init_args.root"),
        *_trainer("precision gradient_clip_val gradient_clip_algorithm gradient_compression sync_batchnorm exact threads"),
        *_trainer("use_distributed_sampler reload_dataloaders_every_n_epochs"),
    ],
    # The samples, their order, what learns from them, and where it began.
    "never": [
        *("seed_everything", "data.seed", "data.source", "data.batch_size", "data.global_batch_size", "data.tail"),
        *("model.class_path", "data.class_path", "data.init_args", "trainer.global_batch_size"),
        *("trainer.limit_train_batches", "trainer.overfit_batches", "model.network", "model.optimizer.class_path", "ckpt_path"),
        *("model.init_from", "model.init_prefix"),
    ],
}
KINDS: dict[str, Kind] = {key: kind for kind, keys in _TABLE.items() for key in keys}
"""Whether a run that exists may resume with another value. 'free': yes; 'said': yes, with a line; 'word': if --change names the
key; 'never': it's another run."""


def kind_of(key: str) -> Kind:
    """Returns the kind of a configuration's key; 'word' for one that is not in the table."""
    while key and key not in KINDS:
        key = key.rpartition(".")[0]
    return KINDS.get(key, "word")


def within(key: str, keys: list[str]) -> bool:
    """Returns whether a key is one of these, or below one of them."""
    return any(key == prefix or key.startswith(prefix + ".") for prefix in keys)


def _lock_mode() -> int:
    """Returns who may open the lock: who may write there. Who only reads could hold it, and keep the run from starting."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o600 | (0 if mask & 0o020 else 0o060)


class Run:
    """A run's folder, held by this process until it ends; a second process is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.fdopen(
                os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, _lock_mode()), "r+"
            )
        except OSError as error:
            wrong = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)  # another host would not help
            user = f"user {os.geteuid()}"
            denied = f"{user} must be able to write there (into a container, mount a folder that it can)"
            read_only = f"mount a folder there that {user} can write"
            hint = {errno.EROFS: read_only, errno.ENOSPC: "make room there"}.get(error.errno or 0, denied)
            raise (UserError if wrong else FaultError)(
                f"The run's folder {folder} can't be made: {error}. HINT: {hint}, or set trainer.default_root_dir."
            ) from error
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FaultError(
                f"The run {folder.name} is going on already: another process writes to {folder}. "
                "HINT: wait for it, stop it, or choose another --run."
            ) from None
        self._is_new = not {path.name for path in folder.iterdir()} - {".lock"}

    def discard_if_empty(self) -> None:
        """Removes the folder of a new run that was refused before its first step, unless it holds what only a step makes."""
        with suppress(OSError):
            if self._is_new and {path.name for path in self.folder.iterdir()} <= {*_BEFORE_ANY_STEP, "checkpoints"}:
                (self.folder / "checkpoints").rmdir() if (self.folder / "checkpoints").is_dir() else None
                for name in _BEFORE_ANY_STEP:
                    (self.folder / name).unlink(missing_ok=True)
                self.folder.rmdir()
                self.folder.parent.rmdir()

    def keep_alone(self, name: str) -> Path:
        """Moves a file out of the folder of what was no run, which is removed, to beside it; returns where the file is."""
        kept = self.folder / name
        if self._is_new:
            kept = kept.replace(self.folder.with_suffix(kept.suffix))
            self.discard_if_empty()
        return kept

    def begin(
        self, config: Mapping[str, object], resume: str, change: str | None, start: str | None, content: bool = True
    ) -> tuple[Path, Manifest] | None:
        """Returns the checkpoint to resume from and its manifest, or None to begin at the beginning.

        `resume`: auto, never or a path; `change`: keys that may have another value than they had, with commas; `start`: a
        checkpoint to begin from, where the run has none of its own; `content`: whether the newest checkpoint is read now.
        """
        words = _words(change)
        checkpoints = self.folder / "checkpoints"
        if restarts():  # the supervisor starts this run again, and not what the command line began with
            resume = self._resume_again(resume)
        if resume == "never":
            if checkpoints_in(checkpoints):
                raise UserError(f"There is a run {self.folder.name} already. HINT: choose another --run, or --resume auto.")
            return None
        are_there = bool(checkpoints_in(checkpoints))
        checkpoint = newest_good(checkpoints, content=content, complete=True) if resume == "auto" else self._at(Path(resume))
        if resume == "auto":
            checkpoint = newest_in_memory(checkpoint and checkpoint[0]) or checkpoint
        begins = checkpoint is None
        lives = lives_of(self.folder / FILE) if begins else []
        if begins and start is not None and manifest_of(Path(start)).exists():
            checkpoint = self._at(Path(start))
        if checkpoint is None and any(life.state == "finished" for life in lives):
            raise UserError(
                f"The run {self.folder.name} has come to its end, and no checkpoint of it is left: it would begin again, among "
                "its own results. HINT: choose another --run, or remove that folder."
            )
        steps = max((life.end_step for life in lives), default=0)
        if begins and steps and not (are_there or restarts()):
            log.warning(
                "The run %s has taken %d steps, and there is no checkpoint in %s: it begins at its beginning. HINT: if it had "
                "saved any, stop it and put them back there: was the folder moved, or is it not mounted?",
                *(self.folder.name, steps, checkpoints),
            )
        if checkpoint is not None:
            if checkpoint[0].parent.absolute() not in (
                checkpoints,
                memory_folder(),
            ):  # another run's: how that one began is its own matter
                config = {**config, "ckpt_path": None}
            self._compare(checkpoint[1], config, words)
            if resume != "auto":
                set_aside_later(step_of(checkpoint[0]), checkpoints)
        return checkpoint

    def _resume_again(self, resume: str) -> str:
        """Returns `auto` for a run that is started again, or the path that it began from, if nothing is saved since."""
        if resume in ("auto", "never"):
            return "auto"
        own = checkpoints_in(self.folder / "checkpoints")
        return "auto" if any(step_of(path) > step_of(Path(resume)) for path in own) or newest_in_memory(None) else resume

    def _at(self, path: Path) -> tuple[Path, Manifest]:
        if not path.exists():
            raise UserError(f"resume={path}: there is no such checkpoint. HINT: --resume is auto, never, or the path of one.")
        try:
            manifest = read_manifest(path)
            check_complete(manifest)
            return path, manifest
        except FaultError:
            raise
        except (ValueError, OSError) as error:
            raise UserError(f"Checkpoint {path} can't be used: {error}. HINT: take an older one, or --resume auto.") from error

    def _compare(self, manifest: Manifest, config: Mapping[str, object], words: list[str]) -> None:
        """Reports what differs from the configuration that the checkpoint was trained with, and refuses what is not allowed.

        Not from config.yaml: a run that was ended between a change and its first checkpoint has not trained with it.
        """
        before = manifest.get("configuration") or saved_config(self.folder)
        if not isinstance(before, Mapping):
            return
        changes = differences(masked(before), masked(config))
        texts = {key: f"{key}: {old!r} -> {new!r}" for key, (old, new) in changes.items()}
        never = [key for key in changes if kind_of(key) == "never"]
        named = [key for key in changes if kind_of(key) == "word"]
        unnamed = [key for key in named if not within(key, words)]
        if never or unnamed:
            hint = (
                "That makes it another run. HINT: choose another --run, or go back to the old value."
                if never
                else f"HINT: if it is to go on so, say --change {','.join([*words, *unnamed])}; otherwise go back to the old "
                "value, or choose another --run."
            )
            what = "; ".join(texts[key] for key in never or unnamed)
            raise UserError(f"The run {self.folder.name} was trained with another configuration: {what}. {hint}")
        if changes:
            log.warning("The configuration of the run has changed: %s", "; ".join(texts.values()))
        if named:
            self._keep_config(cast(Mapping[str, int], manifest["position"])["global_step"], before)

    def _keep_config(self, step: int, known: Mapping[str, object]) -> None:
        """Keeps the configuration that the run was trained with up to here."""
        kept = self.folder / f"config-until-step-{step:09d}.yaml"
        try:
            if not os.path.lexists(kept):
                now = self.folder / "config.yaml"
                if now.exists():
                    write_text(kept, read_text(now, follow=False), stat.S_IMODE(now.stat().st_mode))
                else:  # of a folder that was brought from a store
                    write_text(kept, dump_yaml(known))
        except (OSError, ValueError) as error:
            log.warning("What the run was trained with up to step %d can't be kept: %s", step, shortened(error))


def _words(change: str | None) -> list[str]:
    """Returns the keys that --change names."""
    words = [name.strip() for name in (change or "").split(",") if name.strip()]
    for name in words:
        if kind_of(name) == "never":
            raise UserError(f"--change {name}: that would make it another run. HINT: choose another --run.")
        if not any(within(name, [key]) or within(key, [name]) for key in KINDS):
            raise UserError(
                f"--change {name}: there is no such key. HINT: name them in full, as in model.optimizer.init_args.lr."
            )
    return words


def saved_config(folder: Path) -> dict[str, object] | None:
    """Returns a run's config.yaml, where it can be read."""
    try:
        config = read_yaml(folder / "config.yaml")
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return config if isinstance(config, dict) else None


def _argument(key: str) -> str:
    """Returns the argument that a key belongs to: trainer.max_epochs, data.source, run."""
    parts = key.split(".")
    return ".".join(parts[:2]) if parts[0] in ("trainer", "model", "data", "checkpoints", "watchdog", "recover") else parts[0]


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Returns what differs between two configurations and has a say in the result, by key."""
    known = {_argument(key) for key in flat(before)}  # another version of the project may have had fewer
    changed = {
        key: (old, new)
        for key, (old, new) in differing([before, now]).items()
        if kind_of(key) != "free" and _argument(key) in known
    }
    if changed.get("ckpt_path", (None, ""))[1] is None:
        del changed["ckpt_path"]  # said at the beginning, and no more needed
    return of_the_same_classes(changed)


# Folders -------------------------------------------------------------------------------------------------------------


def open_run(root: Path, name: str | None, kind: str, launch: Launch) -> Run:
    """Opens the run of this name, new or not. Without a name: the one that this launcher began, before it started us again."""
    runs = root / RUNS
    if name is not None:
        folder = folder_of(root, name)
        if os.sep in name and not exists(folder):
            raise UserError(f"There is no run in {folder}. HINT: a path leads to a run that exists; a new one gets a name.")
        return Run(folder)
    if launch.name is not None:
        return Run(runs / f"{kind}-{launch.name}")
    return Run(_new_folder(runs, kind))


def open_beside(root: Path, name: str | None, kind: str, verb: str, launch: Launch) -> Run:
    """Opens a folder for the results of what is not training: a new one, within the run's if it is about a run."""
    if name is not None and exists(folder := folder_of(root, name)):
        return Run(_new_folder(folder, verb))
    return open_run(root, name, f"{kind}-{verb}", launch)


def folder_of_trainer(launch: Launch) -> Path:
    """Returns a folder for a Trainer that was given none: another one for each of a program, the same on all ranks."""
    if launch.kind == "torchrun" and launch.name is None:
        if (launch.nodes or 1) > 1:
            raise UserError("The hosts can't agree on a folder for this run. HINT: give Trainer a default_root_dir.")
        stem = f"run-{launcher_pid()}"
    else:
        stem = f"run-{launch.name or _program_started()}"
    number = next(_TRAINERS)
    return Path(RUNS, stem if number == 1 else f"{stem}-{number}").absolute()


def refuse_url(folder: str | Path | None) -> None:
    """Raises a UserError for a run's folder that is a URL: as a path it would be a new folder of this host."""
    if is_url(folder):
        raise UserError(
            f"trainer.default_root_dir={folder}: a run's folder is on a file system that all hosts see, not at a URL. HINT: "
            "take a folder, and set checkpoints.copy_to to the URL: the folder is copied there, and brought back."
        )


@cache
def _program_started() -> str:
    """Returns when this program was started.

    Ranks find it in the environment that they have from who started them; another program that this one starts is no rank.
    """
    if "LOCAL_RANK" not in os.environ or _STARTED not in os.environ:
        os.environ[_STARTED] = f"{datetime.now():%Y%m%d-%H%M%S}"
    return os.environ[_STARTED]


def exists(folder: Path) -> bool:
    """Returns whether there is a run in this folder."""
    return (folder / "config.yaml").exists() or (folder / "checkpoints").exists()


def run_of(checkpoint: Path) -> Path:
    """Returns the folder of a checkpoint's run; of one that lies by itself, its own."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == "checkpoints" else folder


def _new_folder(place: Path, kind: str) -> Path:
    folder = place / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    with suppress(OSError):  # `Run` says what is wrong
        folder = new_folder(folder)
    return folder


# A run's weights -----------------------------------------------------------------------------------------------------


def weights(folder: Path, which: str | None, monitor: str | None, mode: str) -> Path:
    """Returns a checkpoint of a run to look at: 'best' by a metric, 'last', or None: the best if there is one, else the newest.

    It is verified as for a resume, and nothing is touched: the run may be in training.
    """
    newest = checkpoints_in(folder / "checkpoints")[::-1]
    metrics = {path: _metrics(path) for path in newest}
    known = {name for values in metrics.values() for name in values}
    monitor, mode = chosen_metric(monitor, mode, known)
    values = {path: metrics[path].get(monitor or "", math.nan) for path in newest}
    rated = [path for path in newest if which != "last" and values[path] == values[path]]
    sign = -1 if mode == "max" else 1
    best = sorted(rated, key=lambda path: (sign * values[path], step_of(path)))  # of equals, the first
    if which == "best" and not best:
        names = ", ".join(sorted(known)) or "none"
        raise UserError(
            f"No checkpoint of the run {folder.name} has the metric {monitor!r} (there are: {names}), by which the best is "
            "found. HINT: set checkpoints.monitor, or --ckpt_path last."
        )
    for path in dict.fromkeys(best + ([] if which == "best" else newest)):
        try:
            read_manifest(path)
        except FaultError:
            raise
        except (ValueError, OSError) as error:
            log.warning("Checkpoint %s is not used: %s.", path, error)
            continue
        why = f"the best by {monitor}: {values[path]:.4f}" if path in best else "the newest"
        log.info("Weights of %s, step %d (%s)", path, step_of(path), why)
        return path
    raise UserError(
        f"The run {folder.name} has no good checkpoint in {folder / 'checkpoints'}. HINT: --run takes the name of a run in "
        f"{folder.parent}, --ckpt_path a file."
    )


def _metrics(path: Path) -> dict[str, float]:
    return dict((whole_manifest(path) or {}).get("metrics", {}))
