"""Runs the project as its users do: as a program, in a folder of its own."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import connection
from multiprocessing.context import BaseContext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from hypothesis import settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.launch.early_start import free_port
from project.survive.output import ignore_output_errors
from project.watch.curves import board_tag
from tests.cluster.machine import missing, wait_until
from tests.standin.pool import Pool, meeting_place
from tests.standin.pool import environment as standin

# A shell that runs the tests in the background lets them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

ROOT = Path(__file__).parents[1]
# What a launcher may have left in the environment of the tests must not reach what they start.
_LAUNCHER = (
    *("SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "NODE_RANK", "GROUP_", "PL_", "OMP_NUM"),
    "TORCH_DIST_USE_NCCL2",
)

PATIENCE = 1200
"""Seconds after which a run counts as stuck; not a measure of speed, as other tests run beside it."""

TINY = [
    "--data.source.init_args.image_size=8",
    "--data.source.init_args.train_size=256",
    "--data.source.init_args.val_size=101",
    "--data.source.init_args.test_size=101",
    "--data.num_workers=0",
    "--model.network.init_args.widths=[8,16]",
    "--model.network.init_args.blocks=1",
    "--trainer.precision=32-true",
    "--trainer.log_every_n_steps=1",
]
"""configs/ddp.yaml in a second or two."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what takes long: real hosts, Slurm, Ray")
    parser.addoption(
        "--faults",
        action="store_true",
        help="also what shows again what a shorter test shows: all faults, all numbers of ranks",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs a GPU is skipped without one. Without --all, what takes long is left out, unless it was asked for by its
    file or its name.
    """
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and there is none here: scripts/gpu_check runs it on one"))
    if not config.getoption("--faults"):
        for item in items:
            if item.get_closest_marker("faults"):
                item.add_marker(pytest.mark.skip(reason="one of many, or of the longest: scripts/test --faults"))
    named = any(Path(argument.partition("::")[0]).is_file() for argument in config.args) or config.getoption("-k")
    if config.getoption("--all") or config.getoption("--faults") or named:
        return
    left = {item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("timed")}
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=list(left))


def pytest_report_header(config: pytest.Config) -> str | None:
    left = "What takes long (real hosts, Slurm, kills) is left to scripts/test --all."
    return None if config.getoption("--all") else left


def took(what: str, seconds: float) -> None:
    """For the table in docs/faults.md: pytest -s shows it."""
    print(f"\n{what}: {seconds:.1f} s")


def since_struck(folder: Path) -> float:
    """Seconds since a fault of tests.probes or tests.survive.poison struck a run in this folder."""
    return time.time() - (folder / "struck").stat().st_mtime


def environment(**extra: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    return {**clean, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **extra}


@dataclass
class Run:
    """A finished program: its exit code, what it printed, and the folder that it ran in."""

    code: int
    output: str
    folder: Path

    @property
    def runs(self) -> list[Path]:
        return sorted((self.folder / "lightning_logs").glob("*"))

    def events(self, tag: str) -> list[tuple[int, float]]:
        """What TensorBoard shows under a tag for the only run: steps and values, in its order."""
        (run,) = self.runs
        return [(event.step, event.value) for event in EventAccumulator(str(run)).Reload().Scalars(board_tag(tag))]

    def curve(self, tag: str) -> dict[int, float]:
        """The same, by step."""
        return dict(self.events(tag))


Cli = Callable[..., Run]


def program(folder: Path, *words: str, torchrun: int = 0, timeout: float = PATIENCE, **extra: str) -> Run:
    """Runs `python -m project` in a folder, in processes of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "project", *(["--"] if torchrun else []), *words],
        cwd=folder,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return Run(done.returncode, done.stdout, folder)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """cli("fit", "--config", ...) runs `python -m project` in a temporary folder; torchrun=2 under torchrun."""
    return partial(program, tmp_path)


_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.preloaded"])


def _main(program: str, folder: Path, words: tuple[str, ...], output: Path, extra: dict[str, str]) -> None:
    """Runs a function as a program, in a fresh process that has the libraries loaded already."""
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    ignore_output_errors()  # as `python -m project` does: the lines of several ranks don't mix
    multiprocessing.set_start_method("fork", force=True)  # as in a program of its own; here it would be forkserver
    os.chdir(folder)
    for name in (
        set(os.environ) - set(environment()) - {"TORCH_DIST_USE_NCCL2"}
    ):  # which the project has set when it was imported
        del os.environ[name]
    os.environ.update(extra)
    sys.path.insert(0, str(folder))  # as `python -m` does
    sys.argv = [program.partition(":")[0], *words]
    sys.modules["__main__"].__spec__ = find_spec("project.__main__")  # where Lightning looks for what to start other ranks with
    resolve_name(program)()


def fork(program: str, folder: Path, *words: str, output: Path, context: BaseContext = _SERVER, **extra: str) -> Any:
    """Starts a program without the seconds that importing torch takes; what it prints is added to the file `output`."""
    start: Any = context  # typeshed gives a process to each kind of context, and none to all of them
    process = start.Process(target=_main, args=(program, folder, words, output, extra))
    process.start()
    return process


def forked(
    folder: Path,
    *words: str,
    ranks: int = 1,
    timeout: float = PATIENCE,
    context: BaseContext = _SERVER,
    program: str = "project.cli.main:main",
    one_machine: bool = False,
    **extra: str,
) -> Run:
    """Runs the program without the seconds that importing torch takes; several ranks as plain Python starts them. What is extra
    is in their environment. On `one_machine` the ranks end together, as when its power fails, as soon as a signal ends one.
    """
    output = folder / "output.txt"
    output.write_text("")
    port = str(free_port())
    shared = {"WORLD_SIZE": str(ranks), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [{**shared, **extra, "LOCAL_RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [extra]
    if ranks > 1:
        words = (*words, f"--trainer.devices={ranks}")
    processes = [fork(program, folder, *words, output=output, context=context, **variables) for variables in environments]
    running = {process.sentinel: process for process in processes} if one_machine else {}
    while running:
        ended = [running.pop(sentinel) for sentinel in connection.wait(list(running), timeout)]
        assert ended, f"still running after {timeout} s: {output.read_text()}"
        if any((process.exitcode or 0) < 0 for process in ended):
            for process in running.values():
                process.kill()
    for process in processes:
        process.join(timeout)
        assert process.exitcode is not None, f"still running after {timeout} s: {output.read_text()}"
    codes = [process.exitcode for process in processes]
    return Run(next((code for code in codes if code), 0), output.read_text(), folder)


@pytest.fixture
def quick(tmp_path: Path) -> Cli:
    """Like `cli`, in a fraction of the time: quick("fit", ..., ranks=2)."""
    return partial(forked, tmp_path)


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[Pool]:
    pool = Pool(environment())
    yield pool
    pool.close()


@pytest.fixture
def gpu(tmp_path: Path, gpu_pool: Pool) -> Cli:
    """Like `quick`, on the stand-in for a GPU: gpu("fit", ..., ranks=2); as many GPUs as ranks, unless gpus= says how many."""

    def run(*words: str, ranks: int = 1, gpus: int | None = None, **extra: str) -> Run:
        if ranks == 1 and gpus is not None:  # by default a run takes all of them
            words = (*words, "--trainer.devices=1")
        return Run(*gpu_pool.run(tmp_path, *words, ranks=ranks, gpus=gpus, **extra), tmp_path)

    return run


@pytest.fixture
def gpu_program(tmp_path: Path) -> Iterator[Cli]:
    """Like `cli`, on GPUs: for what launchers do there."""
    with meeting_place() as place:

        def run(*words: str, gpus: int = 1, **extra: Any) -> Run:
            return program(tmp_path, *words, **{**standin(gpus, place), **extra})

        yield run


@pytest.fixture
def cgroup(tmp_path: Path) -> Iterator[None]:
    """The memory cgroup that a probe makes goes after the test."""
    if not any(os.access(place, os.W_OK) for place in ("/sys/fs/cgroup/memory/cgroup.procs", "/sys/fs/cgroup/memory.max")):
        missing("no memory cgroup can be made here")
    yield
    group = (tmp_path / "cgroup").resolve()

    def gone() -> bool:
        with suppress(OSError):  # the last of its processes is about to end
            group.rmdir()
        return not group.exists()

    wait_until(gone, 60, f"{group} can't be removed")
