"""The log of a process: rank 0 reports, the others only warn; on a terminal in colour, and whole in the run's log.txt."""

import logging
import sys
import warnings
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from project.cluster.place import host
from project.untrusted import open_to_append, printable

log = logging.getLogger(__name__)

_WHOLE = "whole"
"""The attribute of a record with the text for a file; a terminal gets a shorter one."""

_FORMAT, _DATE = "%(asctime)s %(level)s %(who)s%(message)s", "%Y-%m-%d %H:%M:%S"
_NOISY = ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_utilities", "pytorch_lightning", "torch")


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable in Python 3.10
    """Writes to what is standard error now: while a bar is up, that is the bar's, which keeps the lines above it."""

    stream: Any = property(lambda self: sys.stderr, lambda self, stream: None)


_COLOURS = {logging.WARNING: "33", logging.ERROR: "1;31", logging.CRITICAL: "1;31"}
"""By level, the terminal's own yellow and red."""


class _Formatter(logging.Formatter):
    """Formats what this project logs as printable text (names of hosts, reasons of other ranks and so on may hold anything),
    with the rank: a factory of records would be the whole program's.

    Args:
        date: the format of the time; None has milliseconds.
        coloured: whether warnings and errors have a colour.
        whole: whether a record that has a longer text for a file is written with it.
    """

    rank, host, world_size = 0, "", 1

    def __init__(self, date: str | None = None, coloured: bool = False, whole: bool = False) -> None:
        super().__init__(_FORMAT, date)
        self._coloured, self._whole = coloured, whole

    def format(self, record: logging.LogRecord) -> str:
        signed = self.rank > 0 or (self.world_size > 1 and record.levelno >= logging.WARNING)
        record.who = f"[rank {self.rank}, {self.host}] " if signed else ""
        record.level = level = f"{record.levelname:7}"
        if self._whole and (text := vars(record).get(_WHOLE)):
            record = logging.makeLogRecord({**vars(record), "msg": text, "args": ()})
        text = super().format(record)
        text = printable(text) if record.name.startswith("project") else text
        colour = _COLOURS.get(record.levelno) if self._coloured else None
        return text.replace(level, f"\x1b[{colour}m{level}\x1b[0m", 1) if colour else text


def open_log(rank: int, host: str) -> None:
    """Sends the log to standard error, with time and level: all of rank 0's lines, of other ranks only warnings, signed."""
    handler, console = _Stderr(), Console(stderr=True)
    handler.setFormatter(_Formatter(_DATE, coloured=console.is_terminal and not console.no_color))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root = logging.getLogger()
    # The second keeps the first lines until there is a file for them.
    root.handlers[:] = [handler, MemoryHandler(1_000, logging.CRITICAL + 1)]
    root.setLevel(logging.INFO)
    logging.raiseExceptions = False  # a reader that went away (| head) is no reason for tracebacks
    name_speaker(rank, host)
    silence_libraries(rank)


def name_speaker(rank: int, host: str, world_size: int = 1) -> None:
    """Signs this process's lines from now on: all lines of other ranks than 0, and the warnings and errors of rank 0."""
    _Formatter.rank, _Formatter.host, _Formatter.world_size = rank, host, world_size


def sign_lines(rank: int, host: str) -> None:
    """Has the handlers of a program of the user's leave out what this rank only reports, and signs its warnings."""

    def signed(record: logging.LogRecord) -> bool:
        if record.name.startswith("project.") and not hasattr(record, "who"):
            record.who, record.msg = rank, f"[rank {rank}, {host}] {record.msg}"
        return record.levelno >= logging.WARNING or not record.name.startswith("project.")

    for handler in logging.getLogger().handlers:
        handler.addFilter(signed)


def silence_libraries(rank: int) -> None:
    """Silences messages of libraries that have no use here: tips, adverts, deprecations, advice that doesn't hold."""
    for name in _NOISY:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # its report was asked for
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # that there is no GPU; of each rank that compiles
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, *args, **kwargs: str(message).strip()
    warnings.simplefilter("default" if rank == 0 else "ignore")
    for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    for advice in (
        "does not have many workers",
        "srun. command is available",
        "Unable to serialize instance",
        "Couldn't infer the batch indices",
        "isinstance.treespec, LeafSpec",
        "lr_scheduler.step... before .optimizer.step",
        "OMP_NUM_THREADS",
        "Checkpoint directory .* exists and is not empty",
        "your dataloader is not resumable",  # it is: the order of samples can start anywhere
        "smaller than the logging interval",  # it counts micro-batches, we count steps
    ):
        warnings.filterwarnings("ignore", f"(?s).*{advice}")


def log_to(path: Path, level: int = logging.INFO) -> None:
    """Writes the log to a file, too, including the lines from before there was one."""
    try:
        file = logging.StreamHandler(open_to_append(path))
    except OSError as error:
        log.warning("There is no log file: %s. Training continues.", error)
        return
    file.setLevel(level)
    file.setFormatter(_Formatter(whole=True))
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, MemoryHandler):
            for record in handler.buffer:
                file.handle(record)
    root.addHandler(file)


class RankLogs(Callback):
    """A callback for debugging: it writes the full log of every rank to rank-N.log in the run's folder."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = Path(trainer.strategy.broadcast(trainer.default_root_dir))
        log_to(folder / f"rank-{trainer.global_rank}.log", logging.DEBUG)
        logging.getLogger().setLevel(logging.DEBUG)
        log.debug("%s is rank %d of %d", host(), trainer.global_rank, trainer.world_size)
