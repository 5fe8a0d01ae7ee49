"""Trains a configuration several times, in parallel if there are cores, in processes that are forked from this one.

This one has loaded all libraries, and started no thread: who has threads must not fork.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from pkgutil import resolve_name

import torch

from project.cluster.cores import cores
from project.errors import UserError
from project.launch.early_start import free_port
from project.launch.orphans import end_with_parent
from project.proof.evidence import compare_trials
from project.proof.plan import FIRST, RUN, Plan, Trial
from project.proof.recorder import MARK, Order

PROGRAM = "project.cli.main:main"
_LAUNCHER = ("SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "NODE_RANK", "GROUP_", "PL_")
_PATIENCE = 600.0  # seconds that a start may take
_PAUSE = 0.1
_GRACE = 30.0  # seconds that the other ranks have when one has failed
_LEFT = 8.0  # when one was killed
_FORK = get_context("fork")
_OUTPUT = "output.txt"  # of all ranks
_TRACEBACK = 20  # lines


@dataclass
class Row:
    """The result of a trial."""

    title: str
    result: str
    """'the same', 'differs', 'fails' or 'not tried'."""
    seconds: float = 0.0
    compared: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    what: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.result in ("the same", "not tried")


# Starts --------------------------------------------------------------------------------------------------------------


def launch(words: Sequence[str], order: Order, ranks: int = 1, anew: bool = False) -> list[int]:
    """Runs `python -m project WORDS` on so many ranks, and returns their exit codes."""
    Path(order.folder).mkdir(exist_ok=True)
    Path(order.folder, _OUTPUT).write_text("")
    shared = {"WORLD_SIZE": str(ranks), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [{**shared, "LOCAL_RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [{}]
    words = (*words, f"--trainer.default_root_dir={order.folder}", f"--trainer.devices={ranks}")
    processes = [_FORK.Process(target=_rank, args=(words, order, variables, anew)) for variables in environments]
    for process in processes:
        process.start()
    until = time.monotonic() + _PATIENCE
    while any(process.exitcode is None for process in processes):
        # Not for long: what a rank has left behind (its warden) may hold the sentinel open.
        wait([process.sentinel for process in processes if process.exitcode is None], _PAUSE)
        if any(process.exitcode for process in processes):
            until = min(until, time.monotonic() + (_LEFT if order.kill else _GRACE))
        if time.monotonic() >= until:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    return [process.exitcode or 0 for process in processes]


def _rank(words: Sequence[str], order: Order, environment: Mapping[str, str], anew: bool) -> None:
    end_with_parent()
    with Path(order.folder, _OUTPUT).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in [name for name in os.environ if name.startswith(_LAUNCHER)]:
        del os.environ[name]
    os.environ.update({**environment, MARK: json.dumps(asdict(order))})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if anew:  # in a new Python, where objects lie elsewhere in memory, and strings may have other hashes
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # which finds what this process has found
        os.execv(sys.executable, [sys.executable, "-m", "project", *words])
    sys.argv = ["project", *words]
    resolve_name(PROGRAM)()


def failure(folder: Path) -> list[str]:
    """Returns the traceback of a trial that failed, or else its error lines."""
    lines = [line for line in (folder / _OUTPUT).read_text(errors="replace").splitlines() if line.strip()]
    if begins := [at for at, line in enumerate(lines) if line.startswith("Traceback ")]:
        return lines[begins[-1] :][:_TRACEBACK]
    errors = [match[1] for line in lines if (match := re.search(r"\bERROR +(?:\[[^]]*\] )?([^\s[].*)", line))]  # of all ranks
    shown = dict.fromkeys(errors or [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)] or lines[-8:])
    return list(shown)


# Trials --------------------------------------------------------------------------------------------------------------


def look(root: Path, words: Sequence[str]) -> Path:
    """Trains to the first micro-batch, and returns the folder of its facts."""
    folder = root / "look"
    process = _start(launch, words, Order(str(folder), "look"))
    try:
        process.join()
    finally:
        _end(process)
    if not (folder / "facts.json").is_file():
        raise UserError("\n  ".join(["The configuration does not come to its first step:", *failure(folder)]))
    return folder


def rows(root: Path, plan: Plan) -> Generator[Row, None, None]:
    """Yields a row for each trial in turn. The first run must work by itself. When it is closed, all trials end."""
    first, free, done = Trial(FIRST, "", like=""), max(1, int(cores())), {""}
    waiting = [first, *(trial for trial in plan.trials if not trial.skipped)]
    running: dict[Trial, ForkProcess] = {}
    try:
        for trial in (first, *plan.trials):
            if trial.skipped:
                yield Row(f"{trial.title}: {trial.skipped}", "not tried")
                continue
            while trial.name not in done:
                for candidate in [entry for entry in waiting if entry.like in done]:
                    if not running or sum(max(entry.ranks) for entry in (*running, candidate)) <= free:
                        waiting.remove(candidate)
                        running[candidate] = _start(_train, root, plan, candidate)
                wait([process.sentinel for process in running.values()], _PAUSE)
                for ended in [entry for entry, process in running.items() if process.exitcode is not None]:
                    del running[ended]
                    done.add(ended.name)
            path = root / trial.name / "row.json"
            failed = {"title": trial.title, "result": "fails", "what": "it could not be compared"}
            row = Row(**(json.loads(path.read_text()) if path.is_file() else failed))
            if trial is not first:
                yield row
            elif not row.holds:
                raise UserError("\n  ".join(["The shortened run fails by itself:", *row.lines]))
    finally:
        for process in running.values():
            _end(process)


def _start(work: Callable[..., object], *arguments: object) -> ForkProcess:
    """Starts the leader of a process group, which forks the ranks of a trial, and compares."""
    process = _FORK.Process(target=_lead, args=(work, *arguments))
    process.start()
    return process


def _end(process: ForkProcess) -> None:
    """Kills a process that leads a group, and all that it started."""
    try:
        os.killpg(process.ident or 0, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


def _lead(work: Callable[..., object], *arguments: object) -> None:
    os.setpgid(0, 0)
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # where cores are busy, threads that compare wait for each other
    work(*arguments)


def _train(root: Path, plan: Plan, trial: Trial) -> None:
    """Trains, compares, and writes row.json."""
    began, folder = time.monotonic(), root / trial.name
    row = Row(trial.title, "the same")
    words = [*plan.words, *trial.words]
    if trial.name == "again":
        words.append(f"--resume={min((root / FIRST / RUN / 'checkpoints').glob('step-*.ckpt'))}")
    for at, ranks in enumerate(trial.ranks, 1):
        kill = trial.kill if at < len(trial.ranks) else ""
        order = Order(str(folder), kill, plan.steps, plan.samples)
        codes = launch([*words, *plan.on.get(ranks, ())], order, ranks, anew=trial.name == "twice")
        if (-signal.SIGKILL in codes) if kill else not any(codes):
            continue
        code = next((code for code in codes if code), 0)
        row.result, row.what, row.lines = "fails", f"it ended with exit code {code}", failure(folder)
        break
    else:
        if trial.name != FIRST:
            compared, first, row.lines = compare_trials(trial, root / trial.like, folder, plan.coarse)
            row.compared = compared.counts
            if first is not None:
                row.result, row.step = "differs", first.step
                row.what = f"the first difference is in step {first.step}, in the {first}"
    row.seconds = time.monotonic() - began
    (folder / "row.json").write_text(json.dumps(vars(row)))
