"""The command line as Lightning's CLI has it: its keys, and one verb for any LightningModule and its data.

Lightning's CLI does the work. What is ours: configs that stand on other configs (`base:`), a folder for each run, the
launcher's numbers of nodes and processes, errors in one line, and the silent traps made loud.
"""

import json
import logging
import os
import shlex
import sys
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import yaml
from jsonargparse import Namespace, add_instantiator
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import nn

from project.checkpoints.callback import Checkpoints, checkpoints_of
from project.checkpoints.reading import Manifest, Verification, memory_folder
from project.checkpoints.store import Store
from project.cli.class_paths import START, Refusal, take_functions
from project.cli.config import HelpAll, Parser, SaveConfig, save_config, touches_nothing
from project.cli.ranks import set_rank
from project.cli.verbs import ABOUT
from project.cluster.place import restarts
from project.cluster.settings import flat
from project.config_files import EVALUATING, RUNS, folder_of
from project.data import ImageData
from project.doctor.doctor import doctor
from project.doctor.findings import verdict
from project.doctor.memory_forecast import dry_run, on_meta
from project.errors import FaultError, UserError, as_user_error
from project.export.export import SETTINGS, export, exportable
from project.launch import early_start
from project.launch.fork_server import await_orders, builds_early, is_forked, is_spare, report_small_build
from project.launch.kubernetes import manifest
from project.launch.launcher import Launch, detect
from project.launch.manifest import command
from project.masking import masked
from project.model import ImageClassifier
from project.resume.changes import ChangedSettings
from project.runs import Run, open_beside, open_run, refuse_url, run_of, saved_config, weights
from project.sharded.meta_build import build_once
from project.step.measurements import resume_loggers
from project.step.supported_strategies import refuse_ranks_in_process
from project.survive.failure import cause_of
from project.survive.hang.watchdog import Watchdog
from project.survive.recovery import Recovery
from project.tracebacks import Folded
from project.trainer import Trainer
from project.typed import Configuration
from project.untrusted import write_text
from project.watch import loggers
from project.watch.console import RankLogs, log_to
from project.watch.dashboard import Dashboard
from project.watch.events import Events
from project.watch.life import Life, commit_of_run
from project.watch.notify import Notify
from project.watch.openmetrics import Metrics
from project.watch.profile import Profile
from project.watch.progress import Progress

log = logging.getLogger(__name__)

SECTIONS: dict[str, type[Callback]] = {
    **{"checkpoints": Checkpoints, "watchdog": Watchdog, "recover": Recovery, "profile": Profile, "dashboard": Dashboard},
    **{"notify": Notify, "metrics": Metrics},
}
"""The sections of the YAML that are the settings of a callback."""

take_functions()  # functions behind a class_path, whatever their signatures say


def with_verbs(trainer_class: type[Trainer]) -> type[Trainer]:
    """Returns the Trainer with our verbs, which are functions that take it first: LightningCLI looks for methods."""
    verbs = {"doctor": doctor, "export": export, "manifest": manifest}
    return type(trainer_class.__name__, (trainer_class,), {"__doc__": trainer_class.__doc__, **verbs})


class ProjectCLI(LightningCLI):
    """A LightningCLI for any LightningModule and LightningDataModule; if none is named, for ImageClassifier and ImageData."""

    trainer: Trainer
    parser: Parser
    running: ClassVar[Trainer | None] = None
    """The Trainer of the verb that has begun, for `main`: an error is reported otherwise from then on."""
    opened: ClassVar[Run | None] = None
    """The run whose folder this process has opened, for `main`: one that is refused leaves none."""

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        def add(name: str, kind: object, default: object, text: str, **more: Any) -> None:
            parser.add_argument(f"--{name}", type=kind, default=default, help=text, **more)

        add("seed_everything", int, 0, "The seed of all random numbers.")
        # `expand` has put the bases before the config that names them: what is parsed, printed and saved stands alone.
        add("base", _resolved, None, "In a config: the config or configs that it extends.")
        parser.add_argument("--help_all", action=HelpAll, help="Show every key and exit.")
        name = f"Name of the run, its folder in {RUNS}/, or the path of one that exists. fit resumes a run that exists; "
        add("run", str | None, None, f"{name}validate, test, predict and export use its weights.")
        resume = "Resume an existing run from its newest good checkpoint (auto), from the one at a path, or not (never)."
        add("resume", str, "auto", resume)
        change = "Keys, separated by commas, that may differ from what the existing run was trained with (docs/keys.md)."
        add("change", str | None, None, change)
        add("doctor", bool, False, "Before a fit, check the cluster for it; the fit does not start if something is bad.")
        dry = "Report what each rank of a fit would hold, without training; for other numbers of ranks: --dry_run=8,64,1024."
        add("dry_run", str | None, None, dry, nargs="?", const="true")
        add("debug", bool, False, "Write a log for each rank, and show the messages of NCCL and torch.distributed.")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        verbs = {**LightningCLI.subcommands(), **{verb: {"model", "datamodule"} for verb in ("doctor", "export")}}
        verbs["manifest"] = {"model", "datamodule", "run", "words", "configs"}
        wanted = sys.argv[1] if len(sys.argv) > 1 else None  # making the parsers of all of them takes half a second
        return {wanted: verbs[wanted]} if wanted in verbs else verbs

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self._of_verb = parser
        if self.model_class is ImageClassifier:
            parser.set_defaults({"model.network": {"class_path": "project.model.MiniResNet"}})
        if self.datamodule_class is ImageData:
            parser.set_defaults({"data.source": {"class_path": "project.data.Synthetic"}})
            parser.link_arguments("seed_everything", "data.seed")
        loggers.take_from_yaml(parser)
        for section, kind in SECTIONS.items():
            parser.add_lightning_class_args(kind, section)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Checks what Lightning acts on next: the seed, and the path of a checkpoint."""
        super().parse_arguments(parser, args)
        settings = self.config[self.config.subcommand]
        if not 0 <= settings.seed_everything < 2**32:
            raise UserError(f"seed_everything is a number from 0 to {2**32 - 1}, not {settings.seed_everything}.")
        self.parser.refuse_odd_floats(settings)
        # Lightning would let the hyper-parameters saved in the checkpoint override the command line, if it saw the path now.
        self._wanted_checkpoint = settings.get("ckpt_path")
        if self._wanted_checkpoint is not None:
            settings.ckpt_path = None

    @property
    def dry(self) -> bool:
        """Returns whether this is a dry run, which trains nothing and leaves nothing."""
        return self.subcommand == "fit" and str(self.config[self.subcommand].dry_run).lower() not in ("none", "false")

    def before_instantiate_classes(self) -> None:
        settings = self.config[self.subcommand]
        if self._wanted_checkpoint is not None:
            settings.ckpt_path = self._wanted_checkpoint
        if self.subcommand == "export":  # before anything slow is done
            exportable(settings.to, settings.batch_size, settings.out)
        if (self.subcommand == "export" or self.dry) and (detect().world_size or 1) > 1:
            verb = f"{self.subcommand}{' --dry_run' * self.dry}"
            raise UserError(f"{verb} takes one process. HINT: start it with plain Python: python -m project {verb} ...")
        path = settings.get("ckpt_path")
        if path is not None and path not in ("best", "last") and not (path and Path(path).exists()):
            hint = f"HINT: best, last, or the path of one in {RUNS}/NAME/checkpoints/."
            text = f"ckpt_path={path}: there is no such checkpoint. {hint}"
            raise UserError(self.parser.placed(text))
        if path in (None, "best", "last") and settings.run is None and self.subcommand in EVALUATING:
            raise UserError(
                f"{self.subcommand} needs weights. HINT: --run NAME takes the best checkpoint of {RUNS}/NAME, and --ckpt_path "
                "that file; with --run, --ckpt_path may also be best or last."
            )
        trainer = settings.trainer
        bounded = trainer.max_epochs is not None or trainer.max_steps != -1 or trainer.max_time is not None
        if self.subcommand == "fit" and not bounded and not trainer.fast_dev_run:
            folder = folder_of(START[0] / (trainer.default_root_dir or ""), settings.run) if settings.run else None
            if folder is not None and folder.is_dir() and not settings.config:
                raise UserError(
                    f"The run {folder.name} has no {folder / 'config.yaml'}, by which it would continue. HINT: put it back, or "
                    "name the config that the run began with by --config."
                )
            raise UserError(
                "Nothing says how long to train. HINT: --config configs/ddp.yaml is a config to begin with; or set "
                "trainer.max_epochs, trainer.max_steps or trainer.max_time."
            )

    def instantiate_classes(self) -> None:
        resolved = self.parser.dump(self.config, skip_link_targets=False, skip_none=False, format="yaml")
        self.config_dump: Configuration = yaml.safe_load(resolved)[self.subcommand]
        if is_forked():
            self._become_rank()
        elif self.dry:
            add_instantiator(on_meta, nn.Module)
        else:
            self.parser.build = self._build
        try:
            super().instantiate_classes()
        except Refusal as refusal:
            raise self._as_user_error(refusal) from refusal.error
        except UserError as error:
            raise as_user_error(error, self.parser.placed(str(error))) from error
        finally:
            self.parser.build = None  # jsonargparse keeps the parser, which would keep the Trainer by this

    def _build(self, make: Callable[[], Namespace]) -> Namespace:
        """Makes all objects of the configuration. `make`: jsonargparse's function for that."""
        if self._is_built_by_rank_0():
            return build_once(make, network_of=lambda made: made[str(self.subcommand)].model, rank=detect().rank)
        return make()

    def _as_user_error(self, refusal: Refusal) -> Exception:
        """Returns the error of a class that can't be made, as one of a setting unless the machine is at fault."""
        error = refusal.error
        if isinstance(error, UserError):
            return as_user_error(error, self.parser.placed(str(error)))
        wrong_path = isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        if isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)) and not wrong_path:
            return error
        text = self.parser.refused(self.config[self.subcommand], refusal)
        folded = Folded(error)
        return UserError(f"{text}\n{folded.text}" if folded.where else text)

    def _become_rank(self) -> None:
        """Waits, in a spare, until it is needed as a rank, with all ready that does not depend on that."""
        trainer = self.config[self.subcommand].trainer
        strategy = trainer.strategy.as_dict() if isinstance(trainer.strategy, Namespace) else trainer.strategy
        count = early_start.ranks(trainer.devices, trainer.accelerator, early_start.gpus())
        if detect().kind == "python" and not (
            early_start.starts_ranks(strategy) and count == int(os.environ.get("WORLD_SIZE", "1"))
        ):
            raise UserError(
                "recover.restarts needs ranks that are processes of their own. HINT: take trainer.strategy=ddp or sharded, and "
                "a number for trainer.devices."
            )
        _ = commit_of_run(), self._changed
        self.parser.build = self._build
        kinds = [self.model_class, self.datamodule_class]
        own = any(not kind.__module__.startswith(("project.", "lightning.")) for kind in kinds if kind is not None)
        if builds_early():
            objects = self.parser.instantiate_classes(self.config)
            self.parser.build = lambda make: objects
        elif not own and touches_nothing(self.config[self.subcommand]):
            self.parser.build = lambda make: report_small_build(partial(self._build, make))
        if is_spare():
            await_orders()
            set_rank()  # its output is a terminal from here on, it may be

    def _is_built_by_rank_0(self) -> bool:
        """Returns whether the strategy gives the other ranks rank 0's network, block by block."""
        settings = self.config[self.subcommand]
        strategy = settings.trainer.strategy
        named = strategy if isinstance(strategy, str) else str(strategy.get("class_path", ""))
        wanted = isinstance(strategy, str) or bool(strategy.init_args.get("deferred", True))
        sharded = named.startswith("sharded") or named.endswith(".Sharded")
        verbs = {"fit", *EVALUATING} - {"export"}  # which has another strategy
        return self.subcommand in verbs and sharded and wanted and not settings.get("doctor")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self.config[self.subcommand]
        refuse_url(settings.trainer.default_root_dir)
        root = START[0] / (settings.trainer.default_root_dir or "")  # a module's __init__ may have changed the directory
        self.folder = root / RUNS
        launch = detect()
        self._saved: Configuration | None = None
        self._begun = self._open(root, launch) if launch.rank == 0 else None
        if launch.rank > 0 and self.subcommand in ("fit", *EVALUATING):
            self.config_init[self.subcommand].ckpt_path = None  # rank 0 tells
        trainer_settings = self.config_init[self.subcommand].trainer
        configuration = masked({key: value for key, value in self.config_dump.items() if key not in ("config", "base")})
        callbacks: list[Callback] = []
        if settings.debug:
            Folded.shows_all = True
            log_communication(self.folder)
            callbacks.append(RankLogs())
        if self.subcommand == "fit" and not self.dry:
            callbacks += [
                ChangedSettings(configuration),
                SaveConfig(self._saved),
                Life(cause_of, changed=lambda: self._changed),
            ]
            if self._begun is not None and _several_hosts(settings, launch):
                callbacks.append(Verification(self._begun[0]))
        kwargs["logger"] = self._loggers(trainer_settings.logger, root, launch.rank)
        if settings.trainer.enable_checkpointing is False or self._is_bare:  # Lightning refuses a callback that saves
            self._of_verb.callback_keys.remove("checkpoints")
        given = trainer_settings.callbacks or []
        trainer_settings.callbacks = [*callbacks, *([given] if isinstance(given, Callback) else given)]
        if self.subcommand in ("export", "manifest"):
            kwargs.update(SETTINGS)
        elif self.dry:
            kwargs.update(devices=1, num_nodes=1)
        places = trainer_settings.devices, trainer_settings.accelerator
        fits = self.folder if self.subcommand == "fit" else None
        early_start.keep(trainer_settings.strategy, *places, torch.cuda.device_count, fits)
        trainer = super().instantiate_trainer(default_root_dir=str(self.folder), **kwargs)
        assert isinstance(trainer, Trainer)
        refuse_ranks_in_process(trainer.strategy, "and this program goes on where they end")
        trainer.configuration = configuration
        if self._begun is None and any(self.folder.glob("events.*")):  # the run was ended before its first checkpoint
            resume_loggers(trainer.loggers, 0)
        return trainer

    @property
    def _is_bare(self) -> bool:
        return bool(self.config[self.subcommand].trainer.barebones)

    @cached_property
    def _changed(self) -> list[str] | None:
        """Returns the names of the settings that differ from their defaults; None if they can't be determined."""
        try:
            changed = self._of_verb.dump(self.config[self.subcommand], skip_default=True, skip_none=False, format="yaml")
            return [*flat(yaml.safe_load(changed) or {})]
        except Exception as error:  # the default of somebody's argument may have any form
            log.debug("Which settings are not the defaults can't be told: %s", error)
            return None

    def _loggers(self, given: object, root: Path, rank: int) -> object:
        """Returns the TensorBoard logger, whose events the report needs, and the loggers that the YAML names.

        The dashboard is for training: an evaluation leaves nothing there, and has runs of its own in the other loggers.
        """
        fit = self.subcommand == "fit"
        if self.dry or (self._is_bare and not given):
            return False
        if isinstance(given, bool) or not given or not (fit or self.subcommand in EVALUATING):
            return fit and given is not False
        inside = self.folder.is_relative_to(root / RUNS)
        name = str(self.folder.relative_to(root / RUNS)) if inside else self.folder.name
        named = loggers.made(given, self.folder, name, rank)
        return [Events(str(self.folder)), *named] if fit else named

    def _open(self, root: Path, launch: Launch) -> tuple[Path, Manifest] | None:
        """Finds the run's folder and the requested checkpoint; for a fit, the checkpoint to resume from."""
        settings, init = self.config[self.subcommand], self.config_init[self.subcommand]
        verb, path = str(self.subcommand), settings.get("ckpt_path")
        named = path in ("best", "last")
        how = (settings.checkpoints.monitor, settings.checkpoints.mode)
        if verb == "manifest" or self.dry:  # leaves nothing
            return None
        if verb == "fit":
            self._run = open_run(root, settings.run, self._kind(), launch)
        else:
            if verb in EVALUATING and (path is None or named):
                path = str(weights(folder_of(root, settings.run), path, *how))
                init.ckpt_path = path
            if verb == "export":  # leaves nothing but its folder
                self.folder = folder_of(root, settings.run) if settings.run else run_of(Path(str(path)))
                return None
            self._run = open_beside(root, settings.run, self._kind(), verb, launch)
        self.folder, ProjectCLI.opened = self._run.folder, self._run
        if verb == "fit" and settings.checkpoints.copy_to:
            Store(settings.checkpoints.copy_to, self.folder).fetch()
        log_to(self.folder / "log.txt")
        if verb in EVALUATING or (self.folder / "config.yaml").exists():  # a new run may be refused: SaveConfig names it
            log.info("Run: %s", self.folder)
        saved = {**self.config_dump, "run": None, "resume": "auto", "change": None, "base": None}
        saved.pop("config", None)
        if verb != "fit":
            save_config(self.folder, {**saved, **({"ckpt_path": path} if verb in EVALUATING else {})})
            return None
        resume = settings.resume
        if named:  # as --resume does
            init.ckpt_path = self.config_dump["ckpt_path"] = None
            resume = str(weights(self.folder, path, *how))
        content = not _several_hosts(settings, launch)  # which wait for this rank; Verification reads it then
        begun = self._run.begin(self.config_dump, resume, settings.change, None if named else path, content)
        if begun is not None:
            checkpoint, manifest = begun
            init.ckpt_path, at = str(checkpoint), manifest["position"]
            if manifest["finished"]:
                log.info("Takes up %s: the end of the run, after %d steps", checkpoint, at["global_step"])
            else:
                log.info("Resumes from %s: epoch %d, step %d of it", checkpoint, at["epoch"] + 1, at["step"])
            # Where it began stays known: a checkpoint of another run, or nothing.
            own = checkpoint.parent.absolute() in (self.folder / "checkpoints", memory_folder())
            saved["ckpt_path"] = (saved_config(self.folder) or {}).get("ckpt_path") if own else str(checkpoint)
        self._saved = saved
        return begun

    def after_instantiate_classes(self) -> None:
        """Notes the Trainer: the verb runs from here on."""
        ProjectCLI.running = self.trainer

    def before_fit(self) -> None:
        settings = self.config[self.subcommand]
        if self.dry:
            dry_run(self.trainer, self.model, self.datamodule, settings.dry_run)
            raise SystemExit(0)
        if settings.doctor and not restarts():  # ranks that a supervisor has replaced are on the same hosts
            self.doctor(self.model, self.datamodule, fast=True, join_timeout=settings.trainer.join_timeout)

    def doctor(self, model: LightningModule, datamodule: LightningDataModule | None = None, **settings: Any) -> None:
        """Ends the program if the cluster is not fit for the run. Without `--run` it creates no run folder."""
        outcome = verdict(doctor(self.trainer, model, datamodule, **settings))
        if self.trainer.is_global_zero:
            beside = self.subcommand == "doctor" and self.config[self.subcommand].run is None
            path = self._run.keep_alone("doctor.json") if beside else self.folder / "doctor.json"
            log.info("The doctor's findings: %s", path)
        if outcome == "bad":
            raise SystemExit(1)

    def manifest(self, model: LightningModule, datamodule: LightningDataModule | None = None, **settings: Any) -> None:
        """Prints the manifest, or writes it to the requested file."""
        words, configs = command(sys.argv[2:])
        run = self.config[self.subcommand].run or self._kind()
        text = manifest(self.trainer, model, datamodule, **settings, run=run, words=words, configs=configs)
        if settings["out"] is None:
            print(text, end="")

    def _kind(self) -> str:
        """Returns the name of the config, or of the run that it was saved by."""
        configs = self.config[self.subcommand].config or []
        path = Path(str(configs[-1] if configs else "default"))
        return path.absolute().parent.name if path.name == "config.yaml" else path.stem

    def before_validate(self) -> None:
        """Leaves the figures to our own line, which log.txt has, too: Lightning's table would print them again."""
        if isinstance(self.trainer.progress_bar_callback, Progress):
            self.config_init[self.subcommand].verbose = False

    before_test = before_validate

    def after_validate(self) -> None:
        """Writes VERB.json: the metrics, and of which weights they are."""
        if self.trainer.is_global_zero:
            metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
            path = self.folder / f"{self.subcommand}.json"
            checkpoint = self.config_init[self.subcommand].ckpt_path
            write_text(path, json.dumps({"checkpoint": checkpoint, "metrics": metrics}, indent=1))
            log.info("The figures: %s", path)

    after_test = after_validate

    def after_fit(self) -> None:
        trainer = self.trainer
        if not trainer.is_global_zero or trainer.interrupted:
            return
        if self._begun is not None and trainer.global_step == self._begun[1]["position"]["global_step"]:
            if not trainer.should_stop:  # else it is known why
                log.info(
                    "The run is finished, after %d steps: nothing was left to do. HINT: a larger trainer.max_epochs (or "
                    "max_steps, or max_time) makes it longer.",
                    trainer.global_step,
                )
        elif not trainer.global_step:
            by_hand = (
                "" if trainer.lightning_module.automatic_optimization else "self.optimizers().step(), which counts steps; "
            )
            raise UserError(
                f"Not one step was trained. HINT: see {by_hand}trainer.max_epochs, max_steps, max_time, limit_train_batches."
            )
        lines = trainer.progress_bar_callback.summary(trainer) if isinstance(trainer.progress_bar_callback, Progress) else {}
        saved = checkpoints_of(trainer)
        if saved and saved.last:
            lines["checkpoint"] = f"{saved.last}" + (f"  (best: {saved.best[1].name})" if saved.best else "")
        lines["dashboard"] = f"tensorboard --logdir {shlex.quote(str(self.folder.parent))}"
        for name, text in lines.items():
            log.info("%-11s %s", name, text)
        if saved and saved.failed:
            raise FaultError(f"The run is over, and its last checkpoint could not be written: {saved.failed}")
        if saved and saved.store and saved.store.failed:
            raise FaultError(f"The run is over, and its last checkpoint could not be copied: {saved.store.failed}")


def log_communication(folder: Path) -> None:
    """Lets NCCL and torch.distributed log what they do; what the user has set already stays.

    INFO and not DETAIL: with gloo, DETAIL makes DistributedDataParallel of torch 2.15 crash (SIGSEGV).
    """
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(folder / "nccl-%h-%p.log"))
    os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]


def _several_hosts(settings: Namespace, launch: Launch) -> bool:
    return (launch.nodes or settings.trainer.num_nodes) > 1


def _resolved(base: object) -> None:
    return None


def open_door(front: type[ProjectCLI], trainer_class: type[Trainer], own_model: bool, own_data: bool) -> None:
    """Reads the command line and runs it. `own_model`, `own_data`: these are classes that the YAML names."""
    front(
        LightningModule if own_model else ImageClassifier,
        None if own_data else ImageData,
        subclass_mode_model=own_model,
        trainer_class=with_verbs(trainer_class),
        save_config_callback=None,  # see SaveConfig
        parser_class=Parser,
        parser_kwargs={"prog": "python -m project", "description": ABOUT},
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
    )
