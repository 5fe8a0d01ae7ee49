"""The loggers that YAML names, as in Lightning: made for the run in its folder, with its name and the ids of earlier starts."""

import inspect
import json
import logging
import os
import re
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.tensorboard import SummaryWriter

from project.errors import FaultError, UserError
from project.masking import masked_text
from project.untrusted import read_json, write_text
from project.watch.events import Events
from project.watch.steady import Csv, MLFlow, Wandb, message_of

log = logging.getLogger(__name__)

_FILE = "loggers.json"  # in the run's folder: the ids of its run of W&B and of MLflow

# Both advertise on the terminal and wait for a server for many minutes. What the user has set stays.
_ENVIRONMENT = {
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",  # log.txt has what is printed
    "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.05",  # a run that is killed would lose its last 15 seconds
    "WANDB_INIT_TIMEOUT": "45",
    "WANDB_FINISH_TIMEOUT": "60",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # it would rather have a database, which is nothing for a shared folder
}

# Lightning wants to be told the first; its second is the environment's, and config.yaml would have it.
_DEFAULTS: tuple[tuple[type[Logger], str, str | None], ...] = (
    (CSVLogger, "save_dir", "."),
    (MLFlowLogger, "tracking_uri", None),
)

_OF_THE_SETTINGS = (TypeError, ValueError, LookupError, AttributeError, ImportError, MisconfigurationException)
"""The errors of a logger that another YAML mends."""

Words = dict[str, Any]
LoggerName = Literal["tensorboard", "csv", "wandb", "mlflow"]
_NAMED: dict[str, type[Logger]] = {
    "csv": CSVLogger,
    "wandb": WandbLogger,
    "mlflow": MLFlowLogger,
}  # TensorBoard's events are there anyway


class Named(DummyLogger):
    """Stands for a logger that YAML names, until the run's folder is known."""

    def __init__(self, kind: type[Logger], /, **words: object) -> None:
        super().__init__()
        self.kind, self.words = kind, words


def take_from_yaml(parser: LightningArgumentParser) -> None:
    """Sets up a parser to make a `Named` of each logger under trainer.logger."""
    parser.add_instantiator(Named, Logger)
    for kind, argument, value in _DEFAULTS:
        init = vars(kind)["__init__"]
        names = inspect.getfullargspec(init).args
        defaults = dict(zip(reversed(names), reversed(init.__defaults__), strict=False)) | {argument: value}
        init.__defaults__ = tuple(defaults[name] for name in names if name in defaults)


def by_name(given: object, folder: Path, rank: int) -> Any:
    """Returns a Trainer's `logger` with loggers in the place of their names, and TensorBoard's events before them."""
    loggers = given if isinstance(given, (list, tuple)) else [given]
    if not any(isinstance(logger, str) for logger in loggers):
        return given
    named = made([logger for logger in loggers if isinstance(logger, str)], folder, folder.name, rank)
    return [Events(str(folder)), *named, *(logger for logger in loggers if not isinstance(logger, str))]


def _from_name(name: str) -> Named:
    """Returns the logger of a short name, with the defaults of its arguments."""
    if (kind := _NAMED.get(name)) is None:
        known = ", ".join(["tensorboard", *_NAMED])
        raise UserError(f"trainer.logger: there is no logger {name!r}. HINT: {known}, or a class_path.")
    parameters = inspect.signature(kind).parameters.values()
    words = {item.name: item.default for item in parameters if item.default is not item.empty}
    return Named(kind, **words | {argument: value for known, argument, value in _DEFAULTS if known is kind})


def made(given: object, folder: Path, name: str, rank: int) -> list[Logger]:
    """Makes the loggers that YAML names, for the run in this folder; the order is the YAML's."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    logging.getLogger("lightning.pytorch.loggers.mlflow").addFilter(lambda record: "Creating it" not in record.getMessage())
    loggers: dict[str, Logger] = {}
    for entry in given if isinstance(given, (list, tuple)) else [given]:
        if entry == "tensorboard":
            continue
        named = _from_name(entry) if isinstance(entry, str) else entry
        assert isinstance(named, Named)  # see `take_from_yaml`
        kind = named.kind
        words, make = dict(named.words), _MAKERS.get(kind)
        try:
            place, logger = make(words, folder, name, rank) if make else (str(id(named)), kind(**words))
        except UserError:
            raise
        except Exception as error:
            extra = {WandbLogger: "wandb", MLFlowLogger: "mlflow"}.get(kind) if isinstance(error, ModuleNotFoundError) else None
            reason = (
                f'{str(error).partition(" HINT:")[0]} HINT: pip install "samerun[{extra}]".' if extra else message_of(error)
            )
            mendable = isinstance(error, _OF_THE_SETTINGS) or getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE"
            wrong = UserError if mendable else FaultError  # a server that is down, say, may be up the next time
            hint = "" if "HINT" in reason else f". HINT: --trainer.logger.help {kind.__name__} lists its arguments."
            raise wrong(f"trainer.logger: {kind.__name__} can't be made: {reason}{hint * (wrong is UserError)}") from error
        if place in loggers:
            raise UserError(f"trainer.logger: {kind.__name__} is there twice, with the same place. HINT: leave one out.")
        loggers[place] = logger
    return list(loggers.values())


def _csv(words: Words, folder: Path, name: str, rank: int) -> tuple[str, Logger]:
    if words["save_dir"] in ("", "."):
        words |= {"save_dir": str(folder), "name": "", "version": ""}
    elif words["version"] is None:
        words["version"] = name
    logger = Csv(**words)
    return f"CSV {logger.log_dir}", logger


def _wandb(words: Words, folder: Path, name: str, rank: int) -> tuple[str, Logger]:
    place = "W&B"  # a process has one run of it
    # jsonargparse gives None for each argument of wandb.init; resume=None would begin the run anew.
    words = {argument: value for argument, value in words.items() if value is not None}
    if words.get("save_dir") in (None, "", ".") and "dir" not in words:
        words["save_dir"] = os.environ.get("WANDB_DIR") or str(folder)
    if words["offline"]:
        words["mode"] = "disabled" if os.environ.get("WANDB_MODE") == "disabled" else "offline"
    if "name" not in words and "WANDB_NAME" not in os.environ:
        words["name"] = name
    logger = Wandb(**words)
    if rank > 0 or {"id", "version"} & words.keys() or "WANDB_RUN_ID" in os.environ:
        return place, logger
    if (known := _ids(folder).get(place)) is None:
        _keep(folder, place, known := secrets.token_hex(4))  # before it can be lost
    return place, Wandb(**words | {"id": known})


def _mlflow(words: Words, folder: Path, name: str, rank: int) -> tuple[str, Logger]:
    if rank > 0:  # where its store is a folder, it would be made
        return f"{id(words)}", DummyLogger()
    words["tracking_uri"] = words["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI")
    if not words["tracking_uri"] and words["save_dir"] in (None, "", ".", "./mlruns"):
        words["save_dir"] = str(folder / "mlruns")
    words["run_name"] = words["run_name"] or name
    address = str(words["tracking_uri"] or words["save_dir"])
    place = "MLflow " + masked_text(address.replace(f"{folder}/", ""))  # the run's folder may be moved
    if words["run_id"] is None and (known := _ids(folder).get(place)) is not None and _is_there(words, known):
        words["run_id"] = known
    logger = MLFlow(**words)
    logger.keep = partial(_keep, folder, place)
    return place, logger


def _is_there(words: Words, run_id: str) -> bool:
    """Returns whether MLflow still has this run."""
    try:
        run = MLFlowLogger(**words | {"run_id": run_id}).experiment.get_run(run_id)
        if run.info.lifecycle_stage == "active":
            return True
    except Exception as error:
        if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
            raise FaultError(f"MLflow does not answer: {message_of(error)}. HINT: look at its tracking_uri.") from error
    log.warning("MLflow has no run %s any more: a new one begins.", run_id)
    return False


def _tensorboard(words: Words, folder: Path, name: str, rank: int) -> tuple[str, Logger]:
    more = {key: value for key, value in words.items() if key not in inspect.signature(TensorBoardLogger).parameters}
    inspect.signature(SummaryWriter).bind("", **more)  # which gets them when training begins
    logger = TensorBoardLogger(**words)
    return f"{id(logger)}", logger  # it is kept, and its id its own


_MAKERS: dict[type[Logger], Callable[..., tuple[str, Logger]]] = {
    **{CSVLogger: _csv, WandbLogger: _wandb, MLFlowLogger: _mlflow, TensorBoardLogger: _tensorboard}
}


def _ids(folder: Path, level: int = logging.WARNING) -> dict[str, str]:
    """Returns the ids that an earlier start has written down."""
    try:
        known = read_json(folder / _FILE, follow=False).items()
        return {place: run_id for place, run_id in known if isinstance(run_id, str) and re.fullmatch(r"[\w-]{1,64}", run_id)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.log(level, "%s can't be read: %s. New runs of W&B and MLflow begin.", folder / _FILE, message_of(error))
        return {}


def _keep(folder: Path, place: str, run_id: str) -> None:
    """Writes an id down, whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / _FILE, json.dumps({**_ids(folder, logging.DEBUG), place: run_id}, indent=1))
    except OSError as error:
        log.warning("%s can't be written: %s. A run that goes on will begin a new run of %s.", folder / _FILE, error, place)
