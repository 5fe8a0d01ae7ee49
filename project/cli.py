"""The front door: YAML and launcher in, Trainer, model and data out. `python -m project fit --help` shows every key.

Lightning's CLI does the work. What is ours: configs that stand on other configs (`base:`), a folder for each run, the
launcher's word on nodes and processes, errors in one line, and the silent traps made loud.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console

from project.bench import report
from project.cluster.findings import verdict
from project.cluster.launcher import LaunchError, detect, host, rank_said
from project.data import ImageData
from project.guests import welcome
from project.model import ImageClassifier
from project.run import RUNS, open_run
from project.survive.checkpoints import Checkpoints
from project.survive.failure import hang_up
from project.survive.failure import report as report_error
from project.survive.watchdog import Watchdog
from project.trainer import Trainer
from project.watch.console import Progress, RankLogs, log_to, open_log

log = logging.getLogger(__name__)

CONFIGS = Path(__file__).parent / "configs"  # in a wheel; beside the package in a checkout


_UNWRITABLE = "Unable to serialize instance"


def _writable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _writable(v) for k, v in value.items() if not str(v).startswith(_UNWRITABLE)}
    return value


welcome()  # functions behind a class_path, whatever their signatures say


class UsageError(ValueError):
    """The command line or a config does not fit together."""


class Parser(LightningArgumentParser):
    """Says what is wrong without listing every flag there is, and takes no abbreviated flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Leaves out defaults that have no YAML form (functions, say): with what is left, the result is the same."""
        text: str = super().dump(*args, **kwargs)
        if _UNWRITABLE not in text:
            return text
        return str(yaml.safe_dump(_writable(yaml.safe_load(text)), sort_keys=False))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        raise UsageError(message)


class ProjectCLI(LightningCLI):
    """LightningCLI for ImageClassifier and ImageData."""

    trainer: Trainer

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--seed_everything", type=int, default=0, help="The seed of everything that is left to chance.")
        # `expand` has put the bases before the config that names them: what is parsed, printed and saved stands alone.
        parser.add_argument("--base", type=_resolved, help="In a config: the config or configs that it stands on.")
        parser.add_argument("--run", type=str | None, default=None, help=f"Name of the run, its folder in {RUNS}/.")
        parser.add_argument(
            "--resume",
            type=str,
            default="auto",
            help="A run that exists goes on from its newest good checkpoint (auto), from the one at a path, or not (never).",
        )
        parser.add_argument(
            "--doctor",
            type=bool,
            default=False,
            help="Before a fit: is the cluster fit for it? Does not start where it is not.",
        )
        parser.add_argument(
            "--debug",
            type=bool,
            default=False,
            help="A log file for each rank, and the words of NCCL and torch.distributed.",
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), **{verb: {"model", "datamodule"} for verb in ("doctor", "bench")}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults(
            {
                "model.network": {"class_path": "project.model.MiniResNet"},
                "data.source": {"class_path": "project.data.Synthetic"},
            }
        )
        parser.link_arguments("seed_everything", "data.seed")
        parser.add_lightning_class_args(Checkpoints, "checkpoints")
        parser.add_lightning_class_args(Watchdog, "watchdog")

    def before_instantiate_classes(self) -> None:
        settings = self.config[self.subcommand]
        path = settings.get("ckpt_path")
        if path and path not in ("best", "last") and not Path(path).is_file():
            raise ValueError(f"There is no checkpoint {path}. HINT: they are in {RUNS}/NAME/checkpoints/.")

    def _parse_ckpt_path(self) -> None:
        """Lightning lets the hyper-parameters saved in a checkpoint override the command line. Not here."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        settings = self.config[self.subcommand]
        self._dump_config()
        root = Path(settings.trainer.default_root_dir or ".").absolute()
        self.folder = root / RUNS
        launch = detect()
        begin = None
        if launch.rank == 0:
            self._run = open_run(root, settings.run, self._kind(), launch)
            self.folder = self._run.folder
            if self.subcommand != "fit" and (self.folder / "config.yaml").exists():
                raise ValueError(
                    f"There is a run {self.folder.name} already. HINT: choose another --run for its {self.subcommand}."
                )
            log_to(self.folder / "log.txt")
            log.info("Run: %s", self.folder)
            if self.subcommand == "fit":
                begin = self._run.begin(self.config_dump, settings.resume)
        if settings.debug:
            loud(self.folder)
            settings = self.config_init[self.subcommand].trainer
            settings.callbacks = [*(settings.callbacks or []), RankLogs()]
        if self.subcommand == "bench":  # its programs have as many as it says
            kwargs.update(devices=1, num_nodes=1)
        trainer = super().instantiate_trainer(default_root_dir=str(self.folder), **kwargs)
        assert isinstance(trainer, Trainer)
        trainer.configuration = {key: value for key, value in self.config_dump.items() if key not in ("config", "base")}
        if begin is not None:
            self._resume(trainer, *begin)
        elif any(self.folder.glob("events.*")):  # the run was ended before its first checkpoint
            trainer.loggers_go_on(0)
        return trainer

    def _resume(self, trainer: Trainer, path: Path, facts: dict[str, Any]) -> None:
        at = facts["position"]
        self.config_init[self.subcommand].ckpt_path = str(path)
        trainer.loggers_go_on(at["global_step"], facts.get("logged", ()))
        if facts["finished"]:
            log.info("The run is finished: nothing is left to do, unless it was made longer.")
        else:
            log.info("Goes on from %s: epoch %d, step %d of it", path, at["epoch"], at["step"])

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except Exception as error:
            launched = getattr(self.trainer.strategy.launcher, "procs", [])
            report_error(error, self.trainer.global_rank, host(), launched)
            raise SystemExit(1) from None
        finally:
            hang_up()

    def before_fit(self) -> None:
        settings = self.config[self.subcommand]
        if settings.doctor:
            self.doctor(self.model, self.datamodule, fast=True, join_timeout=settings.trainer.join_timeout)

    def doctor(self, model: LightningModule, datamodule: LightningDataModule, **settings: Any) -> None:
        """Ends the program where the cluster is not fit for the run."""
        found = verdict(self.trainer.doctor(model, datamodule, **settings))
        if self.trainer.is_global_zero:
            log.info("The doctor's findings: %s", self.folder / "doctor.json")
        if found == "bad":
            raise SystemExit(1)

    def bench(self, model: LightningModule, datamodule: LightningDataModule, **settings: Any) -> None:
        found = self.trainer.bench(model, datamodule, **settings)
        (self.folder / "bench.json").write_text(json.dumps(found, indent=1))
        report.draw(found, self.folder / "bench.svg")
        report.show(found, Console(width=None if sys.stdout.isatty() else 130))
        log.info("The figures: %s, the picture: bench.svg beside it", self.folder / "bench.json")

    def _kind(self) -> str:
        configs = self.config[self.subcommand].config or []
        stem = Path(str(configs[-1])).stem if configs else "default"
        return stem if self.subcommand == "fit" else f"{stem}-{self.subcommand}"

    def after_fit(self) -> None:
        trainer = self.trainer
        if not trainer.is_global_zero or trainer.interrupted:
            return
        lines = trainer.progress_bar_callback.summary(trainer) if isinstance(trainer.progress_bar_callback, Progress) else {}
        saved = trainer.checkpoint_callback
        if isinstance(saved, Checkpoints) and saved.last:
            lines["checkpoint"] = f"{saved.last}" + (f"  (best: {saved.best[1].name})" if saved.best else "")
        lines["dashboard"] = f"tensorboard --logdir {self.folder.parent}"
        for name, text in lines.items():
            log.info("%-11s %s", name, text)
        if isinstance(saved, Checkpoints) and saved.failed:
            log.error("The run is over, and its last checkpoint could not be written: %s", saved.failed)
            raise SystemExit(1)


def loud(folder: Path) -> None:
    """NCCL and torch.distributed say what they do; what the user has set already stays.

    INFO and not DETAIL: with gloo, DETAIL makes DistributedDataParallel of torch 2.15 crash (SIGSEGV).
    """
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(folder / "nccl-%h-%p.log"))
    os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]


def _resolved(base: object) -> None:
    return None


def expand(argv: list[str]) -> list[str]:
    """Each `--config X` becomes `--config BASE --config X`, for the configs that X names as its base, theirs first."""
    expanded: list[str] = []
    words = iter(argv)
    for word in words:
        if word in ("-c", "--config"):
            expanded += [flag for path in _stack(next(words, "")) for flag in ("--config", str(path))]
        elif word.startswith("--config="):
            expanded += [flag for path in _stack(word.partition("=")[2]) for flag in ("--config", str(path))]
        else:
            expanded.append(word)
    return expanded


def _stack(name: str, above: tuple[Path, ...] = ()) -> list[Path]:
    path = _find(name, above[-1] if above else None)
    if path in above:
        raise ValueError(f"{above[-1]} and {path} stand on each other: one 'base' must go.")
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{path}{where}: this is not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold keys and values, as in 'trainer: {{max_epochs: 1}}'.")
    bases = content.get("base") or []
    bases = [bases] if isinstance(bases, str) else bases
    return [one for base in bases for one in _stack(base, (*above, path))] + [path]


def _find(name: str, asking: Path | None) -> Path:
    """A config beside the one that names it, from here, or one that comes with the project."""
    places = [asking.parent / name] if asking else [Path(name)]
    if not Path(name).is_absolute():
        plain = name.removeprefix("configs/")
        places += [CONFIGS / plain, CONFIGS.parent.parent / "configs" / plain]
    for place in places:
        if place.is_file():
            return place.resolve()
    raise ValueError(
        f"There is no config {name!r}"
        + (
            f", which {asking} names as its base."
            if asking
            else ". HINT: those that come with the project are called configs/*.yaml."
        )
    )


def main() -> None:
    """Runs the command line. An error that the user can mend takes one line; any other, its traceback, printed once."""
    rank = rank_said()
    open_log(rank, host())
    try:
        rank = detect().rank
        open_log(rank, host())
        sys.argv[1:] = expand(sys.argv[1:])
        ProjectCLI(
            ImageClassifier,
            ImageData,
            trainer_class=Trainer,
            save_config_kwargs={"overwrite": True},  # every run has a folder of its own
            parser_class=Parser,
            parser_kwargs={"prog": "python -m project"},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )
    except Exception as error:
        if isinstance(error, LaunchError) and rank > 0:
            time.sleep(10)  # srun and torchrun end all when one has: not before rank 0 has said why
        if not isinstance(error, LaunchError) or rank == 0 or os.environ.get("LOCAL_RANK") == "0":
            report_error(error, rank, host())  # rank 0, it seems, has not found the same
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
