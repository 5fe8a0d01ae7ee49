"""The checks of scripts/gpu_check, each a function. gpu.py runs each in a process and a folder of its own:

    python scripts/measure/gpu_checks.py NAME cuda      prints what it found as JSON, in its last line

Every fact comes from a program of this project that was started as a user would. `cpu` in place of `cuda` takes the same ways
on a small scale, and says nothing about a GPU.
"""

import gzip
import json
import os
import pickle
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_pairs import GLOO, NCCL, SHARED_BY_GLOO, run_pair, shared_backend
from gpu_speed import BAD, OK, ROOT, Result, against_plain, share_of_peak

SMALL = (
    *("--data.source.init_args.image_size=8", "--data.source.init_args.train_size=512", "--data.num_workers=0"),
    *("--model.network.init_args.widths=[8,16]", "--model.network.init_args.blocks=1", "--data.global_batch_size=16"),
    *("--data.batch_size=8", "--watchdog.at_least=6"),
)
"""configs/ddp.yaml on a CPU, in seconds."""
SIZE: dict[str, tuple[str, ...]] = {"cuda": (), "cpu": SMALL}
EXACT_BITS = "--trainer.deterministic=true"
"""Set wherever bits are compared: without it cuDNN may add up in another order each time."""


@dataclass
class Done:
    """A program that has ended."""

    code: int
    output: str
    seconds: float


def variables() -> dict[str, str]:
    """The environment of the programs of a check."""
    path = os.pathsep.join((str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PYTHONPATH": path}


def start(*command: str, **extra: str) -> Done:
    """A program, in this check's folder; what it says is shown, too. `extra` is in its environment."""
    begun = time.monotonic()
    process = subprocess.run(command, env={**variables(), **extra}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"$ {' '.join(command)}\n{process.stdout}(exit code {process.returncode})", flush=True)
    return Done(process.returncode, process.stdout, time.monotonic() - begun)


def project(*words: str, ranks: int = 1) -> Done:
    """Runs `python -m project` on one rank, or on two: as it starts them itself."""
    return start(sys.executable, "-m", "project", *words, f"--trainer.devices={ranks}")


def project_twice(*words: str) -> Done:
    """Runs `python -m project` as two programs, the two ranks of a run, that share the only GPU."""
    begun = time.monotonic()
    pair = run_pair([sys.executable, "-m", "project", *words, "--trainer.num_nodes=2", "--trainer.devices=1"], variables())
    print(f"$ project {' '.join(words)}, twice\n{pair.output}(exit codes {pair.codes})", flush=True)
    return Done(pair.code, pair.output, time.monotonic() - begun)


def backend_of_two(on: str) -> tuple[str, int]:
    """How two ranks meet here, and on how many GPUs."""
    import torch

    if on == "cpu":
        return GLOO, 0
    gpus = min(2, torch.cuda.device_count())
    return (NCCL if gpus == 2 else shared_backend(variables())), gpus


def fit(on: str, run: str, *words: str, ranks: int = 1) -> Done:
    """A training by configs/ddp.yaml that never logs within the steps that are looked at."""
    place = (f"--trainer.accelerator={'gpu' if on == 'cuda' else 'cpu'}", *SIZE[on])
    fixed = (f"--config={ROOT}/configs/ddp.yaml", f"--run={run}", "--trainer.max_steps=60")
    quiet = ("--trainer.log_every_n_steps=1000", "--trainer.limit_val_batches=0")
    command = ("fit", *fixed, *quiet, *place, *words)
    if ranks == 1:
        return project(*command)
    backend, gpus = backend_of_two(on)
    if gpus != 1:
        return project(*command, ranks=ranks)
    return project_twice(*command, *((SHARED_BY_GLOO,) if backend == GLOO else ()))


def callback(name: str, **settings: Any) -> str:
    return "--trainer.callbacks+=" + json.dumps({"class_path": f"gpu_probes.{name}", "init_args": settings})


def last_line(done: Done) -> str:
    lines = [line for line in done.output.strip().splitlines() if line.strip()]
    return lines[-1][-200:] if lines else f"exit code {done.code}, and not a word"


# 1: what there is ----------------------------------------------------------------------------------------------------


def environment(on: str) -> Result:
    import torch

    facts: dict[str, Any] = {
        "host": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "torchvision", "lightning", "numpy")},
        "cuda": torch.version.cuda,
    }
    if on == "cpu":
        return Result(OK, f"{facts['cores']} cores, torch {facts['torch']}", facts)
    count = torch.cuda.device_count()
    facts["devices"] = [str(torch.cuda.get_device_properties(number)) for number in range(count)]
    facts["capability"] = [list(torch.cuda.get_device_capability(number)) for number in range(count)]
    facts["peers"] = [[a != b and torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    try:
        facts["cudnn"] = torch.backends.cudnn.version()
    except RuntimeError as error:  # another one than torch was built for: the fits show whether it works
        facts["cudnn"] = str(error)
    if torch.distributed.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    questions = {"driver": ("--query-gpu=driver_version", "--format=csv,noheader"), "links": ("topo", "-m")}
    for key, words in questions.items():
        with suppress(OSError):
            facts[key] = start("nvidia-smi", *words).output.strip()
    product = torch.randn(256, 256, device="cuda") @ torch.eye(256, device="cuda")  # does the driver fit this torch?
    computes = bool(product.isfinite().all())
    name = torch.cuda.get_device_name()
    figure = f"{count} x {name}, driver {(facts.get('driver') or 'unknown').splitlines()[0]}, NCCL {facts.get('nccl', 'none')}"
    return Result(OK if computes else BAD, figure, facts)


# 2: the tests that need a GPU ----------------------------------------------------------------------------------------


def gpu_tests(on: str) -> Result:
    """The tests that are marked, of which none may be skipped, and those of the stand-in that these GPUs are enough for."""
    marked = run_tests("--all", "-m", "gpu", f"{ROOT}/tests")
    ran = marked, run_tests("-n4", f"{ROOT}/tests/standin", TESTS_ON_GPU="1")
    # Tests that are skipped leave the exit code 0, and have shown nothing.
    fine = all(not done.code and counts.get("passed") for done, counts in ran) and not marked[1].get("skipped")
    figures = [
        ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) or last_line(done) for done, counts in ran
    ]
    return Result(OK if fine else BAD, "; of the stand-in's: ".join(figures))


def run_tests(*words: str, **extra: str) -> tuple[Done, dict[str, int]]:
    """Runs pytest; the counts are those of its last line."""
    done = start(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *words, **extra)
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last_line(done))
    return done, {outcome: int(number) for number, outcome in counts}


# 3: a run, and whether the host waits --------------------------------------------------------------------------------


def two_ranks(on: str) -> Result:
    """DDP on two ranks. Gloo copies gradients through the host, which waits for them."""
    backend, gpus = backend_of_two(on)
    result = fits(on, "16-mixed" if on == "cuda" else "32-true", ranks=2, waits=backend == GLOO)
    place = {0: "the CPU", 1: "one GPU", 2: "two GPUs"}[gpus]
    return Result(result.state, f"2 ranks on {place} by {backend}: {result.figure}", {**result.more, "backend": backend})


def fits(on: str, precision: str, ranks: int = 1, waits: bool = False) -> Result:
    """Within one epoch, at whose end the host waits, and without progress lines, which read the loss."""
    long = ("--data.source.init_args.train_size=16384", "--trainer.enable_progress_bar=false")
    done = fit(on, "it", f"--trainer.precision={precision}", *long, callback("NoWaits", allowed=waits), ranks=ranks)
    looked = Path("looked.json")
    if done.code or not looked.exists():
        return Result(BAD, last_line(done))
    seen = json.loads(looked.read_text())
    right = seen["device"].startswith(on) and seen["steps"] == 30 and f"instead of {precision}" not in done.output
    seen_waits = "not looked for waits" if waits else "no wait" if on == "cuda" else "whether it waits can't be seen on a CPU;"
    return Result(OK if right else BAD, f"{seen_waits} in {seen['steps']} steps on {seen['device']}", seen)


def as_graph(on: str) -> Result:
    """Recorded steps are the steps that they were recorded from."""
    words = ("--trainer.precision=32-true", "--trainer.deterministic=true", "--data.source.init_args.train_size=16384")
    for run, flags in (("alone", ()), ("graph", ("--trainer.capture=auto", callback("NoWaits")))):
        done = fit(on, run, *words, "--trainer.enable_progress_bar=false", *flags)
        if done.code or "one operation after the other" in done.output:
            return Result(BAD, last_line(done))
    return same("alone", "graph")


# 4: to the last bit --------------------------------------------------------------------------------------------------


def same(*runs: str) -> Result:
    done = start(sys.executable, "-m", "project", "same", *runs)
    return Result(OK if done.code == 0 else BAD, next(iter(done.output.splitlines()), "nothing was said")[:100])


def twice(on: str) -> Result:
    for run in ("one", "other"):
        if (done := fit(on, run, EXACT_BITS)).code:
            return Result(BAD, last_line(done))
    return same("one", "other")


def resumed(on: str) -> Result:
    """Saved every 10 steps and killed after 25: steps 21 to 25 are computed twice. Compared with a run that went through."""
    if (done := fit(on, "whole", EXACT_BITS)).code:
        return Result(BAD, last_line(done))
    words = (EXACT_BITS, "--checkpoints.every_n_steps=10", callback("Fault", step=25))
    killed, continued = fit(on, "killed", *words), fit(on, "killed", *words)
    if killed.code != -9 or continued.code:
        return Result(BAD, f"killed: exit code {killed.code}, resumed: {continued.code}: {last_line(continued)}")
    if "Resumes from" not in continued.output:
        return Result(BAD, "it did not resume from a checkpoint")
    return same("whole", "killed")


def exact(on: str) -> Result:
    for ranks in (1, 2):
        if (done := fit(on, f"on-{ranks}", "--trainer.exact=true", EXACT_BITS, ranks=ranks)).code:
            return Result(BAD, last_line(done))
    return same("on-1", "on-2")


# 5: profiles ---------------------------------------------------------------------------------------------------------


def profile(on: str) -> Result:
    done = fit(on, "it", "--profile.step=20", "--profile.steps=3", "--profile.memory=true")
    if done.code:
        return Result(BAD, last_line(done))
    folder = Path("lightning_logs/it/profiles")
    (trace,) = folder.glob("*.json.gz")
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if on == "cuda" else ("cpu_op",)
    count = sum(event.get("cat") in wanted for event in events)
    seen = {"events": count, "files": sorted(path.name for path in folder.iterdir())}
    figure = f"{count:,} {'device' if on == 'cuda' else 'CPU'} events in 3 steps"
    if on == "cuda":
        snapshots = [pickle.loads(path.read_bytes()) for path in folder.glob("*.pickle")]  # this run has just written it
        segments = sum(len(snapshot.get("segments", ())) for snapshot in snapshots)
        figure += f", a memory snapshot of {segments} segments"
        count = min(count, segments)
    return Result(OK if count else BAD, figure, seen)


# 6: failures on two --------------------------------------------------------------------------------------------------


BLAMED = {
    "kill": "rank 1 on {host} was killed by signal 9",
    "hang": "The run hangs: rank 1 on {host}",
    "abort": "NCCL communicator was aborted on rank 1",
}


def fault(on: str, how: str, code: int | None, within: float, micro_batches: int = 1) -> Result:
    """Rank 1 of 2 breaks: the run ends in time, with this code (None: any but 0), and says which rank it was, and no other.

    Struck before step 21, which neither logs nor saves: rank 0 goes on into the step's collectives, and waits there. With one
    micro-batch a step nothing else sets the ranks apart; with several, the host of rank 1 may be behind as well.
    """
    words = ("--watchdog.at_least=10", "--trainer.max_steps=100000", "--trainer.max_epochs=100000")
    step = ("--data.global_batch_size=null", f"--trainer.accumulate_grad_batches={micro_batches}")
    done = fit(on, "it", callback("Fault", rank=1, step=21, how=how), *words, *step, ranks=2)
    struck, host = Path("struck"), socket.gethostname()
    if not struck.exists():
        return Result(BAD, f"the fault was not reached: {last_line(done)}")
    seconds = time.time() - float(struck.read_text())
    named = BLAMED[how].format(host=host) in done.output and f"The run hangs: rank 0 on {host}" not in done.output
    right = done.code == code if code is not None else done.code != 0
    state = OK if named and right and seconds <= within else BAD
    return Result(state, f"rank 1 {'named' if named else 'not named'}, exit code {done.code}, {seconds:.0f} s")


# 7: the doctor -------------------------------------------------------------------------------------------------------


def doctor(on: str) -> Result:
    place = (f"--trainer.accelerator={'gpu' if on == 'cuda' else 'cpu'}", *SIZE[on])
    done = start(sys.executable, "-m", "project", "doctor", f"--config={ROOT}/configs/ddp.yaml", *place)
    rows = re.findall(r"^│ (\S.*?) +│ (good|warning|bad) ", done.output, re.MULTILINE)
    not_good = [f"{name}: {verdict}" for name, verdict in rows if verdict != "good"]
    return Result(OK if done.code == 0 and rows else BAD, f"exit code {done.code}; {', '.join(not_good) or 'all is good'}")


CHECKS: dict[str, Callable[[str], Result]] = {
    "environment": environment,
    "two ranks": two_ranks,
    "fit in 32-true": lambda on: fits(on, "32-true"),
    "fit in 16-mixed": lambda on: fits(on, "16-mixed"),
    "fit in bf16-mixed": lambda on: fits(on, "bf16-mixed"),
    "a step as a graph": as_graph,
    "speed at 64": against_plain,
    "speed at 1,024": lambda on: share_of_peak(on, "none", *(("default",) if on == "cuda" else ())),
    "GPU tests": gpu_tests,
    "the same YAML twice": twice,
    "killed and resumed": resumed,
    "exact on 1 and on 2": exact,
    "a rank is killed": lambda on: fault(on, "kill", None, 30),
    "a device hangs": lambda on: fault(on, "hang", 75, 60),
    "a device hangs, accumulating": lambda on: fault(on, "hang", 75, 60, micro_batches=4),
    "NCCL gives up": lambda on: fault(on, "abort", 75, 60),
    "profile": profile,
    "doctor": doctor,
    "max-autotune at 1,024": lambda on: share_of_peak(on, "max-autotune"),
}

if __name__ == "__main__":
    print(json.dumps(asdict(CHECKS[sys.argv[1]](sys.argv[2]))))
