"""The verb `prove`: `python -m project prove --config mine.yaml` tests whether the promise holds for a YAML on this machine.

A shortened run is trained several times: twice alike, again from its first checkpoint, killed and resumed, with loader
processes, and on other numbers of ranks. All that it leaves is compared with what the first one left.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from project.cli.reading import ended, show
from project.cluster.settings import flat
from project.config_files import documents, expand, option, run_config, without
from project.errors import WRONG, UserError
from project.proof.plan import RUN, TRIALS, Plan, alone, shortened
from project.untrusted import read_yaml

if TYPE_CHECKING:
    from project.proof.trials import Row

_ABOUT = """Tests the promise on a YAML: the same bits after kills and, with trainer.exact, on any number of ranks.
Trains a shortened run several times in a temporary folder, on the CPU, and compares all that it leaves. Exit code 0: the
promise holds, 1: something differs, 2: the configuration does not work by itself."""


def main(words: Sequence[str]) -> int:
    """Prints a table, and returns the exit code."""
    names = [trial.name for trial in TRIALS]
    parser = argparse.ArgumentParser("python -m project prove", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--json", metavar="FILE", help="writes the table there, too")
    parser.add_argument("--keep", action="store_true", help="leaves the trials' folder, and says where it is")
    parser.add_argument("--only", metavar="TRIAL,...", help=f"not all trials: {', '.join(names)}")
    parser.epilog = "Everything else is as for fit: --config FILE, --run NAME, and keys."
    given, rest = parser.parse_known_args(words)
    only = given.only.split(",") if given.only else names
    if not {*only} <= {*names}:
        parser.error(f"--only takes {', '.join(names)}, and not {given.only}")
    root = Path(tempfile.mkdtemp(prefix="project-prove-", dir=os.environ.get("TMPDIR")))
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return ended(lambda: _prove(root, rest, only, given.json), 10_000)
    finally:
        signal.signal(signal.SIGTERM, before)
        if given.keep:
            print(f"The trials: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


def _prove(root: Path, words: Sequence[str], only: Sequence[str], file: str | None) -> int:
    argv = run_config(["fit", *words])
    if option(argv, "-c", "--config") is None:
        raise UserError("Nothing says what is to be proved. HINT: --config FILE, or --run NAME of a run that exists.")
    settings = {key: value for part in documents(expand(argv)) for key, value in flat(part).items()}
    base = [*without(argv, "--run", "--resume"), *alone(words, settings)]
    import project.cli.main  # noqa: F401, because all that the trials need is loaded once
    from project.proof import trials

    began, rows = time.monotonic(), []
    folder = trials.look(root, [*base, *_look(base, settings)])
    plan = shortened(base, json.loads((folder / "facts.json").read_text()), read_yaml(folder / RUN / "config.yaml"))
    like = {trial.like for trial in plan.trials if trial.name in only}
    plan = replace(plan, trials=tuple(trial for trial in plan.trials if trial.name in {*only, *like}))
    show(plan.summary)
    with closing(trials.rows(root, plan)) as results:
        for row in results:
            rows.append(row)
            took = f"{row.seconds:.0f} s" if row.seconds else ""
            show(f"  {row.result:9} {took:>5}  {row.title}")
    seconds = time.monotonic() - began
    failed = _explain(plan, rows)
    left_out = sum(row.result == "not tried" for row in rows)
    so_far = f", as far as it was tried: {len(rows) - left_out} of {len(rows)} trials" if left_out else ""
    show(f"The promise {'does NOT hold' if failed else 'holds'} for this configuration{so_far} ({seconds:.0f} s).")
    if file is not None:
        report = {"holds": not failed, "seconds": round(seconds, 1), "words": plan.words, "trials": [*map(vars, rows)]}
        try:
            Path(file).write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            print(f"ERROR   --json {file} can't be written: {error}", file=sys.stderr)
            return int(failed) or WRONG  # a promise that does not hold stays that
    return int(failed)


def _look(base: list[str], settings: Mapping[str, object]) -> list[str]:
    """Returns the flags that make a run train on one micro-batch, for any kind of batches."""
    words = ["--trainer.max_epochs=1", "--trainer.val_check_interval=1.0"]
    if str(option(base, "--trainer.exact") or settings.get("trainer.exact")).lower() == "true":  # which needs a global batch
        return words
    section = "trainer" if "data.class_path" in settings or option(base, "--data", "--data.class_path") else "data"
    return [*words, f"--{section}.global_batch_size=null", "--trainer.accumulate_grad_batches=1"]


def _explain(plan: Plan, rows: Sequence["Row"]) -> bool:
    """Prints what differs and how much was compared; returns whether anything differs."""
    failed = [row for row in rows if not row.holds]
    printed = set[str]()
    if chance := plan.trials[0].name == "twice" and not rows[0].holds:
        show("\nTwo runs that are alike differ already: what follows for the others is not shown.")
    for row in failed[:1] if chance else failed:  # a line is printed once
        show("\n".join((f"\n{row.title}: {row.what}", *(f"  {line}" for line in row.lines if line not in printed))))
        printed |= {*row.lines}
    most = max((row.compared for row in rows), key=lambda counts: sum(counts.values()))
    show(f"\nCompared: {', '.join(f'{many} {kind}' for kind, many in most.items() if many)}.")
    return bool(failed)
