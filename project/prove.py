"""python -m project prove --config mine.yaml: does the promise hold for this YAML, on this machine?

A shortened run is trained several times: twice alike, killed and resumed, with loader processes, on other numbers of ranks, and
again from its first checkpoint. All that it leaves is compared with what the first one left. Exit code 0: the promise holds,
1: something differs, 2: the configuration does not work by itself.
"""

import argparse
import json
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from project.cluster.cores import cores
from project.cluster.settings import flat
from project.config_files import documents, expand, option, run_config, without
from project.errors import WRONG, UserError
from project.proof.plan import NAMES, Plan, Trial, alone, shortened

_ABOUT = """Shows that the promise holds for a YAML: the same bits after kills, with trainer.exact on any number of ranks, too.
A shortened run is trained several times in a temporary
folder, on the CPU, and all that it leaves is compared. Exit code 0: the
promise holds, 1: something differs, 2: the configuration does not work by itself."""
_AGAIN = "again from its first checkpoint"
_PAUSE = 0.1  # seconds


@dataclass
class Row:
    """What came of a trial."""

    title: str
    result: str
    """'the same', 'differs', 'fails' or 'not tried'."""
    seconds: float = 0.0
    compared: dict[str, int] = field(default_factory=dict)
    step: int | None = None
    what: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.result in ("the same", "not tried")


def main(words: Sequence[str]) -> int:
    """Prints a table, and returns the exit code."""
    parser = argparse.ArgumentParser("python -m project prove", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--json", metavar="FILE", help="writes the table there, too")
    parser.add_argument("--keep", action="store_true", help="leaves the trials' folder, and says where it is")
    parser.add_argument("--only", metavar="TRIAL,...", help=f"not all trials: {', '.join(NAMES)}")
    parser.epilog = "Everything else is as for fit: --config FILE, --run NAME, and keys."
    given, rest = parser.parse_known_args(words)
    only = given.only.split(",") if given.only else [*NAMES]
    if not set(only) <= set(NAMES):
        parser.error(f"--only takes {', '.join(NAMES)}, and not {given.only}")
    root = Path(tempfile.mkdtemp(prefix="project-prove-", dir=os.environ.get("TMPDIR")))
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        return _prove(root, rest, only, given.json)
    except UserError as error:
        print(f"ERROR   {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return 130
    finally:
        for leader in _LEADERS:
            _end(leader)
        signal.signal(signal.SIGTERM, before)
        if given.keep:
            print(f"The trials: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _prove(root: Path, words: Sequence[str], only: Sequence[str], file: str | None) -> int:
    argv = run_config(["fit", *words])
    if option(argv, "-c", "--config") is None:
        raise UserError("Nothing says what is to be proved. HINT: --config FILE, or --run NAME of a run that exists.")
    base = [*without(argv, "--run", "--resume"), *alone(words)]
    import_module("project.cli")  # all that the trials need, once
    began = time.monotonic()
    plan = _plan(root, base)
    plan = replace(plan, trials=tuple(trial for trial in plan.trials if trial.name in only))
    print(plan.summary, flush=True)
    width = max(len(_AGAIN), *(len(f"{trial.title}: {trial.skipped}") for trial in plan.trials))
    first, rows = Trial("first", "the first"), list[Row]()
    for row in _rows(root, plan, first):
        rows.append(row)
        took = f"{row.seconds:5.0f} s" if row.seconds else ""
        print(f"  {row.title:{width}} {row.result:10} {took}".rstrip(), flush=True)
    failed = [row for row in rows if not row.holds]
    printed = set[str]()
    if chance := plan.trials[0].name == "twice" and not rows[0].holds:
        print("\nTwo runs that are alike differ already: what follows for the others is not shown.")
    for row in failed[:1] if chance else failed:  # a line is printed once
        print(f"\n{row.title}: {row.what}", *(f"  {line}" for line in row.lines if line not in printed), sep="\n")
        printed |= {*row.lines}
    most = max((row.compared for row in rows), key=lambda counts: sum(counts.values()))
    print(f"\nCompared: {', '.join(f'{many} {kind}' for kind, many in most.items() if many)}.")
    seconds = time.monotonic() - began
    print(f"The promise {'does NOT hold' if failed else 'holds'} for this configuration ({seconds:.0f} s).")
    if file is not None:
        report = {
            "holds": not failed,
            "seconds": round(seconds, 1),
            "words": plan.words,
            "trials": [asdict(row) for row in rows],
        }
        Path(file).write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(failed))


# The plan ------------------------------------------------------------------------------------------------------------


def _plan(root: Path, base: list[str]) -> Plan:
    """Looks at the first micro-batch, and shortens the run."""
    folder = root / "look"
    said = {key: value for part in documents(expand(base)) for key, value in flat(part).items()}
    words = [*base, "--trainer.max_epochs=1", "--trainer.val_check_interval=1.0"]
    if str(option(base, "--trainer.exact") or said.get("trainer.exact")).lower() != "true":  # which needs a global batch
        section = "trainer" if "data.class_path" in said or option(base, "--data", "--data.class_path") else "data"
        words += [f"--{section}.global_batch_size=null", "--trainer.accumulate_grad_batches=1"]
    code = _forked(_look, folder, words)
    if code != -signal.SIGKILL or not (folder / "facts.json").is_file():
        raise UserError(_failure(folder, "The configuration does not come to its first step"))
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    config: dict[str, Any] = yaml.safe_load((folder / "lightning_logs/prove/config.yaml").read_text())
    return shortened(base, facts, config)


# Trials --------------------------------------------------------------------------------------------------------------


_FORK = get_context("fork")
_LEADERS: list[Any] = []
"""The processes of trials that have begun: each forks its ranks, and compares."""


def _forked(work: Any, *arguments: Any) -> int:
    process = _start(work, *arguments)
    process.join()
    code: int = process.exitcode
    return _codes(process, code)


def _codes(process: Any, code: int) -> int:
    _LEADERS.remove(process)
    return code - 256 if code > 128 else code


def _start(work: Any, *arguments: Any) -> Any:
    process = _FORK.Process(target=_lead, args=(work, *arguments))
    process.start()
    _LEADERS.append(process)
    return process


def _lead(work: Any, *arguments: Any) -> None:
    """Runs in a process of its own, with a group of its own: who ends it ends all that it started."""
    from project.survive.orphans import end_with_parent

    os.setpgid(0, 0)
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(work(*arguments) % 256)


def _end(process: Any) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


def _order(folder: Path, kill: str = "", steps: int = 1) -> Any:
    from project.proof.recorder import Order

    folder.mkdir(exist_ok=True)
    return Order(folder, kill, steps)


def _look(folder: Path, words: Sequence[str]) -> int:
    from project.proof.trials import launch

    return launch([*words, f"--trainer.default_root_dir={folder}"], _order(folder, "look"))


def _rows(root: Path, plan: Plan, first: Trial) -> Iterator[Row]:
    """Yields a row for each trial in turn; those on one rank are trained side by side, where there are cores."""
    code = _forked(_train, root, plan, first)
    if code:
        raise UserError(_failure(root / first.name, "The shortened run fails by itself"))
    waiting, done = [trial for trial in plan.trials if not trial.skipped], set[str]()
    going: dict[str, tuple[Trial, Any]] = {}
    free = max(1, int(cores()))
    for trial in plan.trials:
        if trial.skipped:
            yield Row(f"{trial.title}: {trial.skipped}", "not tried")
            continue
        while trial.name not in done:
            while waiting and (not going or sum(one.ranks for one, _ in going.values()) + waiting[0].ranks <= free):
                begun = waiting.pop(0)
                going[begun.name] = begun, _start(_train, root, plan, begun)
            wait([process.sentinel for _, process in going.values()], _PAUSE)
            for name, (_, process) in list(going.items()):
                if process.exitcode is not None:
                    done.add(name)
                    _LEADERS.remove(process)
                    del going[name]
        path = root / trial.name / "rows.pickle"
        if path.is_file():
            yield from pickle.loads(path.read_bytes())
        else:
            yield Row(trial.title, "fails", what=_failure(root / trial.name, "it could not be compared"))


def _train(root: Path, plan: Plan, trial: Trial) -> int:
    """Trains, compares, and leaves rows.pickle. Returns the exit code of the training."""
    from project.proof.trials import launch

    began = time.monotonic()
    folder = root / trial.name
    words = [*plan.words, *trial.words, f"--trainer.default_root_dir={folder}"]
    if trial.kill:
        code = launch(words, _order(folder, trial.kill, plan.steps), trial.ranks)
        if code != -signal.SIGKILL:
            return _leave(folder, [_failed(trial, folder, code or 1, began)])
    code = launch(words, _order(folder), trial.ranks)
    if trial.name == "first":
        return code
    if code:
        return _leave(folder, [_failed(trial, folder, code, began)])
    rows = [_row(root, plan, trial, time.monotonic() - began)]
    if trial.again:
        began = time.monotonic()
        again = replace(trial, title=_AGAIN, again=False)
        oldest = min((folder / "lightning_logs/prove/checkpoints").glob("step-*.ckpt"))
        code = launch([*words, f"--resume={oldest}"], _order(folder), trial.ranks)
        rows.append(_failed(again, folder, code, began) if code else _row(root, plan, again, time.monotonic() - began))
    _leave(folder, rows)
    return 0


def _leave(folder: Path, rows: list[Row]) -> int:
    (folder / "rows.pickle").write_bytes(pickle.dumps(rows))
    return 0


def _failed(trial: Trial, folder: Path, code: int, began: float) -> Row:
    what = _failure(folder, f"it ended with exit code {code}")
    return Row(trial.title, "fails", time.monotonic() - began, what=what)


def _failure(folder: Path, what: str) -> str:
    from project.proof.trials import output

    lines = [line for line in output(folder).splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(^| )ERROR +(\[[^]]*\] )?[^\s[]", line)]
    shown = dict.fromkeys(errors or [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)] or lines[-8:])
    return "\n".join([f"{what}:", *(f"  {line}" for line in shown)])


def _row(root: Path, plan: Plan, trial: Trial, seconds: float) -> Row:
    """Compares in a process of its own: tensors are compared by several threads, and who has threads must not fork."""
    path = root / trial.name / "row.pickle"
    process = _FORK.Process(target=_compare, args=(root, plan, trial, seconds, path))
    process.start()
    process.join()
    row: Row = pickle.loads(path.read_bytes())
    return row


def _compare(root: Path, plan: Plan, trial: Trial, seconds: float, path: Path) -> None:
    """Leaves the row of a trial in a file."""
    from project.proof.evidence import compare_trials
    from project.proof.hints import hints

    finding = compare_trials(root / "first", root / trial.name, trial.ranks > 1, trial.kept, plan.coarse)
    row = Row(trial.title, "the same", seconds, dict(finding.compared.counts))
    if finding.first is not None:
        row.result, row.step = "differs", finding.first.step
        row.what = f"the first difference is in step {finding.first.step}, in the {finding.first}"
        row.lines = [*finding.lines, *hints(trial.name, trial.ranks, finding, root / trial.name)]
    path.write_bytes(pickle.dumps(row))
