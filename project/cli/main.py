"""The front door: YAML and launcher in, Trainer, model and data out. `python -m project fit --help` shows every key.

`main` runs the command line, and reports what ends it.
"""

import logging
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch import seed_everything

from project.checkpoints.callback import checkpoints_of
from project.checkpoints.reading import checkpoints_in
from project.cli.class_paths import START
from project.cli.config import Parser, brought, refuse_odd_sections
from project.cli.project_cli import ProjectCLI, open_door
from project.cli.ranks import fork_ranks
from project.cluster.connection import close_connections
from project.cluster.place import host, restarts
from project.cluster.settings import flat
from project.config_files import config_of_run, documents, expand, named_configs, option, run_config, strangers
from project.errors import WRONG, NonFiniteError, UserError, listed
from project.launch import early_start
from project.launch.fork_server import is_fork_server, is_forked, report_as_rank
from project.launch.launcher import LaunchError, detect, rank_said
from project.launch.sweep import with_trial
from project.step.evaluation import loaders_of
from project.step.state import step_state
from project.survive.failure import BY_COMMAND, exit_at_once, exit_code, report_error
from project.survive.hang.watchdog import Watchdog
from project.survive.life import start_report
from project.survive.signals import SIGNALS
from project.tracebacks import Folded, title
from project.trainer import Trainer
from project.typed import callbacks_of
from project.watch.console import open_log
from project.watch.history import FILE, read_history
from project.watch.life import Life
from project.watch.report import write

log = logging.getLogger(__name__)

_LAST_COPY = 20.0
"""Seconds for the last copy of the run's folder, which may hold why the run has failed."""
PATIENCE = 10.0
"""Seconds that a process has for its end before the threads that keep it are reported."""
_SAMPLES = 32
"""Samples that a message lists."""


def _seed_imports() -> None:
    """Seeds what the user's files draw when they are imported, which is before the configuration is resolved."""
    seeds = [document["seed_everything"] for document in documents(sys.argv) if "seed_everything" in document]
    seed: object = option(sys.argv, "--seed_everything") or (seeds[-1] if seeds else 0)
    with suppress(ValueError):  # which the parser reports
        seed_everything(int(str(seed)), verbose=False)


def main(front: type[ProjectCLI] = ProjectCLI, trainer_class: type[Trainer] = Trainer) -> None:
    """Runs the command line. An error that the user can mend takes one line; any other, its traceback, printed once."""
    BY_COMMAND.set()
    START[0] = Path.cwd()
    rank = rank_said()
    open_log(rank, host())
    say = log.info
    try:
        rank = detect().rank
        open_log(rank, host())
        words = with_trial(sys.argv[1:])
        if words != sys.argv[1:] and rank == 0:
            log.info("Trial: %s", " ".join(argument for argument in words if argument not in sys.argv))
        if rank == 0 and (config := config_of_run(words)) and (who := strangers(config)):
            log.warning("%s %s, and what it names is imported and called. HINT: read it first, or copy it.", config, who)
        sys.argv[1:] = expand(run_config(words))
        Parser.configs = named_configs(sys.argv)
        refuse_odd_sections(Parser.configs)
        if is_fork_server():
            fork_ranks()
            rank = detect().rank
        _seed_imports()
        own_model, own_data = brought(sys.argv[1:])
        open_door(front, trainer_class, own_model, own_data)
    except NonFiniteError:  # rank 0 has said it, and all ranks end alike
        raise SystemExit(1) from None
    except Exception as error:
        if is_forked():
            report_as_rank()
            rank = detect().rank
        say = log.info if ProjectCLI.running is None else log.debug  # the error is the last word
        code = _end(error, rank)
        if isinstance(error, torch.AcceleratorError) and (trainer := ProjectCLI.running) is not None:
            if trainer.is_global_zero:
                start_report(Path(trainer.default_root_dir) / FILE)
            exit_at_once(SystemExit(code))  # before NCCL, which has met the error as well, aborts this process
        raise SystemExit(code) from None
    finally:
        ran, ProjectCLI.running, ProjectCLI.opened = ProjectCLI.running, None, None
        if ran is not None:
            why = sys.exc_info()[1]
            closed = close_connections(10 if why is None else 2)
            _write_report(ran, say)
            if not closed:
                exit_at_once(why)
            if _threads():
                watch = threading.Timer(PATIENCE, _report_threads, (why,))
                watch.daemon = True
                watch.start()


def _threads() -> list[str]:
    """Returns the names of the threads for which Python waits before it ends."""
    return [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]


def _report_threads(why: BaseException | None) -> None:
    """Reports threads that keep this process from its end. One that has failed ends at once: a launcher, or other ranks, wait
    for its exit code.
    """
    if isinstance(why, SystemExit) and why.code:
        exit_at_once(why)
    if names := _threads():
        log.warning(
            "The run is over, and Python waits for %s. HINT: daemon=True in threading.Thread, or end the thread in teardown.",
            listed([f"the thread {name}" for name in names]),
        )


def _end(error: Exception, rank: int) -> int:
    """Reports the error that ends this process, and returns the exit code. A run that is refused, or has no Trainer, leaves no
    folder."""
    trainer, run = ProjectCLI.running, ProjectCLI.opened
    if trainer is not None:
        error = _as_error_of_a_setting(error, trainer)
        launched = early_start.take_launched(trainer.strategy.launcher)
        code = report_error(error, trainer.global_rank, launched, _folder(trainer), _at(trainer))
        lives = callbacks_of(trainer, Life)
        if code == WRONG and any(life.has_trained(trainer) for life in lives):
            code = 1  # the configuration has worked up to here
        for life in lives:
            life.amend(trainer, error)
    else:
        code = exit_code(error)
        if (code == WRONG and rank > 0) or early_start.undecided():
            until = time.monotonic() + 10  # who started this process ends it when rank 0 has: not before that one has said why
            while SIGNALS.noted is None and time.monotonic() < until:
                time.sleep(0.05)
        if not isinstance(error, LaunchError) or rank == 0 or os.environ.get("LOCAL_RANK") == "0":
            report_error(error, rank)  # rank 0, it seems, has not found the same
    if run is not None and (trainer is None or (code == WRONG and not trainer.global_step)):
        run.discard_if_empty()
    return code


def _as_error_of_a_setting(error: Exception, trainer: Trainer) -> Exception:
    """Returns the error of a path that is not there as one of the setting that names it, at the beginning of a fit.

    Later it was there; and of several hosts, another one may have it.
    """
    if isinstance(error, UserError) or not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return error
    begun = trainer.global_step or restarts() or checkpoints_in(Path(trainer.default_root_dir, "checkpoints"))
    if trainer.state.fn != "fit" or trainer.num_nodes > 1 or begun:
        return error
    texts = {key: value.rstrip("/") for key, value in flat(trainer.configuration).items() if isinstance(value, str)}
    for key, text in sorted(texts.items(), key=lambda setting: -len(setting[1])):
        places = {text, os.path.abspath(text)} if text and os.path.abspath(text) != os.getcwd() else ()
        if any(re.search(rf"'{re.escape(place)}(/[^']*)?'", str(error)) for place in places):
            return UserError(f"{key}={text}: {title(error)}\n{Folded(error).text}".rstrip())
    return error


def _at(trainer: Trainer) -> str:
    """Returns how far it has come, and this rank's samples: a fit's last step, or the batch of an evaluation; else ''."""
    state, fits = step_state(trainer), trainer.state.fn == "fit"
    text = state.failed_evaluation or (f"after step {trainer.global_step}" if fits else "")
    batch = state.evaluated if state.failed_evaluation else state.micro_batch if fits else None
    if batch is None or not (samples := batch.samples):
        return text
    text += ", of samples" if state.failed_evaluation else "; this rank's last training micro-batch was of samples"
    more = f" and {len(samples) - _SAMPLES} more" * (len(samples) > _SAMPLES)
    text = f"{text} {', '.join(map(str, samples[:_SAMPLES]))}{more}"
    usual_size = loaders_of(trainer).micro_batch or 1
    if not state.failed_evaluation and 1 < usual_size != len(samples):
        why = "the last step of an epoch takes what is left, and drop_last=True leaves that out"
        text += f" ({len(samples)}, not {usual_size}: {why})"
    return text


def _folder(trainer: Trainer) -> Path | None:
    """Returns the run's folder, as this rank knows it, where a fit has come so far."""
    if trainer.state.fn != "fit":
        return None
    if trainer.is_global_zero:
        return Path(trainer.default_root_dir)
    return next((watchdog.folder for watchdog in callbacks_of(trainer, Watchdog)), None)  # a finder exchanges the callbacks


def _write_report(ran: Trainer, say: Callable[..., None]) -> None:
    """Writes the report of a fit that has ended, however it did."""
    folder = Path(ran.default_root_dir)
    wrote = any(isinstance(item, Life) and item.wrote for item in ran.callbacks)
    if not (ran.is_global_zero and wrote and folder.is_dir()):  # one that was refused has left none
        return
    try:
        say("%-11s %s", "report", write(read_history(folder, folder.name)))
    except Exception as error:  # a page less is no reason for another exit code
        log.warning(
            "The report can't be written: %s. HINT: python -m project report %s", error, shlex.quote(os.path.relpath(folder))
        )
    if (saved := checkpoints_of(ran)) and saved.store:
        saved.store.send(_LAST_COPY)
