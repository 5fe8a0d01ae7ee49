#!/usr/bin/env python
"""All that needs a GPU, in one command: a table, and gpu.json.

    scripts/gpu_check                     on a machine with a GPU: within ten minutes; on two, also what needs two
    scripts/gpu_check --only 'speed'      the checks whose names have this in them; max-autotune is run only so
    scripts/gpu_check --on cpu            the same checks on a CPU, small: whether the commands work; says nothing about a GPU

Exit codes; correctness comes before speed:
  0  every check was run, and is ok
  1  at least one is bad: something is broken
  3  no GPU here (or --on cpu): nothing was measured on one, and without a GPU no gpu.json is written
  4  what was run is ok, but some checks were not run, and the table says why
  5  everything works, but a speed goal is missed: the check's state is 'slow'
  6  both 4 and 5
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu_pairs import remember
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("gpu_checks.py")
BUDGET = 570.0  # seconds for all; of ten minutes, some are left for what is printed
NOTHING, LEFT_OUT, TOO_SLOW, LEFT_OUT_AND_TOO_SLOW = 3, 4, 5, 6  # exit codes
OK, BAD, SLOW, NOT_RUN = "ok", "bad", "slow", "not run"
_ENDS = 5.0  # seconds that are left for ending a check


@dataclass(frozen=True)
class Check:
    """A line of the table."""

    name: str
    wanted: str
    seconds: int
    """About how long on a GPU (an H200). A check begins if so much of the budget is left."""
    limit: int
    gpus: int = 1
    on_cpu: bool = True
    """Whether it has a meaning on a CPU."""
    by_name: bool = False
    """Whether it is run only where --only names it."""


# The most valuable come first, and two ranks before all others; where the budget ends, the last are left out.
CHECKS = (
    Check("environment", "devices, driver and NCCL; a product is computed", 8, 60),
    Check("two ranks", "DDP, on two GPUs, or both on one: ends well; by NCCL, the host never waits in 30 steps", 30, 120),
    Check("fit in 16-mixed", "ends well; the host never waits in 30 steady steps", 15, 90, on_cpu=False),
    Check("killed and resumed", "SIGKILL, then project same: the same as unkilled", 40, 120),
    Check("exact on 1 and on 2", "trainer.exact, project same: the same", 40, 120),
    Check("a rank is killed", "rank 1 is named, within 30 s", 20, 90),
    Check("a device hangs", "rank 1 is named, exit code 75, within 60 s", 30, 120, gpus=2),
    Check("a device hangs, accumulating", "the same, with 4 micro-batches a step", 30, 120, gpus=2),
    Check("NCCL gives up", "rank 1 is named, exit code 75, within 60 s", 30, 120, gpus=2, on_cpu=False),
    Check("fit in bf16-mixed", "as in 16-mixed", 15, 90, on_cpu=False),
    Check("a step as a graph", "trainer.capture=auto: the host never waits; project same as without", 30, 120, on_cpu=False),
    Check("speed at 64", "at least 5 times the plain loop in fp32", 55, 150),
    Check("GPU tests", "pytest -m gpu; tests/standin on this GPU in place of the stand-in: all pass", 90, 240, on_cpu=False),
    Check("speed at 1,024", "at least 35 % of the bf16 peak (H100: 137,000 samples/s)", 60, 180),
    Check("the same YAML twice", "project same: the same to the last bit", 25, 90),
    Check("profile", "device events in the trace; a memory snapshot that can be read", 15, 60),
    Check("doctor", "exit code 0", 15, 90),
    Check("fit in 32-true", "as in 16-mixed", 15, 90),
    Check("max-autotune at 1,024", "at least 35 % of the bf16 peak", 90, 200, on_cpu=False, by_name=True),
)


def chosen(only: str) -> list[Check]:
    """The checks whose names have this in them; without a name, those that a call has time for."""
    return [check for check in CHECKS if only in check.name and (only or not check.by_name)]


def members(folder: str) -> list[int]:
    """The living processes that work in this folder: ranks and their wardens have sessions of their own."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            place = os.readlink(process / "cwd")
            if (place == folder or place.startswith(f"{folder}/")) and int(process.name) != os.getpid():
                pids.append(int(process.name))
    return pids


def end(folder: str) -> None:
    """Ends those, and waits until they are gone: one may have started another meanwhile, and the next check wants the GPU."""
    until = time.monotonic() + _ENDS
    while (left := members(folder)) and time.monotonic() < until:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def perform(check: Check, on: str, limit: float, program: Path = PROGRAM) -> dict[str, Any]:
    """Runs a check in a process and a folder of its own, and ends whatever it leaves behind."""
    begun = time.monotonic()
    with TemporaryDirectory(prefix="gpu-check-") as place:
        folder = os.path.realpath(place)
        path = os.pathsep.join((str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
        around = {**os.environ, "PYTHONPATH": path} | ({"CUDA_VISIBLE_DEVICES": ""} if on == "cpu" else {})
        output = Path(folder, "said.txt")
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, str(program), check.name, on],
                cwd=folder, env=around, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(folder)
            process.wait()
        lines = output.read_text(errors="replace").strip().splitlines()
    result: dict[str, Any] = {"state": BAD, "figure": f"ended with code {code}: {lines[-1][:150] if lines else 'not a word'}"}
    if code is None:
        cut = limit < check.limit  # it might have ended well
        result = {"state": NOT_RUN if cut else BAD, "figure": f"not through after {limit:.0f} s" + ", the budget's end" * cut}
    elif code == 0:
        result = json.loads(lines[-1])
    if result["state"] not in (OK, SLOW):
        result["said"] = lines[-60:]
    return {**result, "seconds": round(time.monotonic() - begun, 1)}


def not_run(check: Check, on: str, gpus: int, left: float) -> str | None:
    """Why a check can't be run here; None: it can."""
    if on == "cpu":
        return None if check.on_cpu else "needs a GPU"
    if gpus < check.gpus:
        return f"needs {check.gpus} GPUs"
    if left < check.seconds:
        return f"{max(0, left):.0f} s of the budget were left, and it takes about {check.seconds}; --only '{check.name}'"
    return None


def table(title: str, rows: Sequence[Sequence[str]], columns: Sequence[str]) -> None:
    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, justify="right" if column == "seconds" else "left")
    for row in rows:
        made.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 130).print(made)


def plan(checks: Sequence[Check]) -> int:
    """What would be done on a GPU; nothing is measured, and nothing is written."""
    rows = []
    for check in checks:
        why = "no GPU here" if check.gpus == 1 else f"no GPU here, needs {check.gpus}"
        rows.append((check.name, NOT_RUN, why, check.wanted, f"about {check.seconds}"))
    title = "No GPU here: nothing was measured. On one, this would be done:"
    table(title, rows, ("check", "state", "why", "wanted", "seconds"))
    alone, all_ = sum(check.seconds for check in checks if check.gpus == 1), sum(check.seconds for check in checks)
    print(f"About {alone} s on one GPU, {all_} on two; where {BUDGET:.0f} s are over, the last ones are left out.")
    if extra := [f"--only '{check.name}'" for check in CHECKS if check.by_name and check not in checks]:
        print(f"Run only by name: {', '.join(extra)}.")
    print(f"No gpu.json is written, and the exit code is {NOTHING}.")
    return NOTHING


def gpus_here() -> int:
    """As torch can use them; GPUs that only the driver knows are an error, and not 'no GPU'."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    with suppress(OSError):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
        if re.search(r"^GPU \d", done.stdout, re.MULTILINE):
            print(f"The driver has GPUs that this torch ({torch.__version__}) can't use:\n{done.stdout}", file=sys.stderr)
            sys.exit(1)
    return 0


def exit_code(states: set[str], on: str) -> int:
    """0 is for what was measured on a GPU, all of it; a check that was not run is no pass."""
    if BAD in states:
        return 1
    if on == "cpu":
        return NOTHING
    if NOT_RUN in states:
        return LEFT_OUT_AND_TOO_SLOW if SLOW in states else LEFT_OUT
    return TOO_SLOW if SLOW in states else 0


def commit() -> str:
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError):
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"
    return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(
        "scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--on", choices=["cuda", "cpu"], default="cuda", help="cpu: says nothing about a GPU")
    parser.add_argument("--only", default="", help="a part of the names of the checks to run")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all of them (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: gpu.json, or with --on cpu gpu-check-on-cpu.json")
    given = parser.parse_args()
    checks = chosen(given.only)
    if not checks:
        parser.error(f"no check has {given.only!r} in its name; there are: {', '.join(check.name for check in CHECKS)}")
    gpus = gpus_here() if given.on == "cuda" else 0
    if given.on == "cuda" and not gpus:
        return plan(checks)

    begun, results = time.monotonic(), []
    for check in checks:
        left = given.budget - (time.monotonic() - begun)
        row: dict[str, Any] = {"name": check.name, "wanted": check.wanted}
        if reason := not_run(check, given.on, gpus, left):
            row |= {"state": NOT_RUN, "figure": reason, "seconds": 0.0}
        else:
            print(f"{check.name} ...", file=sys.stderr, flush=True)
            row |= perform(check, given.on, min(check.limit, left - _ENDS) if given.on == "cuda" else check.limit)
        if backend := row.get("more", {}).get("backend"):
            remember(backend)
        results.append(row)
    code = exit_code({result["state"] for result in results}, given.on)
    title, out = f"On {gpus} GPU{'s' if gpus > 1 else ''}, commit {commit()}", "gpu.json"
    if given.on == "cpu":
        title, out = "On a CPU, small: whether the commands work. Says nothing about a GPU.", "gpu-check-on-cpu.json"
    rows = [
        (result["name"], result["state"], result["figure"], result["wanted"], f"{result['seconds']:.0f}") for result in results
    ]
    table(title, rows, ("check", "state", "figure", "wanted on a GPU" if given.on == "cpu" else "wanted", "seconds"))
    report = {
        "on": given.on, "gpus": gpus, "commit": commit(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begun, 1), "exit_code": code, "checks": results,
    }  # fmt: skip
    path = given.out or Path(out)
    path.write_text(json.dumps(report, indent=1))
    print(f"All of it: {path}. Exit code {code}.")
    return code


if __name__ == "__main__":
    sys.exit(main())
