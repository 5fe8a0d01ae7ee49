"""Programs that train in turns, one at a time, on a machine that is otherwise still: A B A B ... in one call."""

import json
import math
import os
import signal
import socket
import statistics
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, NoReturn

from project.errors import UserError
from scripts.bench.worker import SOCKET

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Program:
    """What is started: one command, or one for each rank (then it learns its rank from the environment)."""

    name: str
    ranks: int
    commands: tuple[tuple[str, ...], ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Measured:
    """What a program's turns came to."""

    seconds: list[float] = field(default_factory=list)  # a step
    cpu: list[float] = field(default_factory=list)  # processor seconds a step, of all its processes
    phases: dict[str, float] = field(default_factory=dict)  # seconds a step, mean over the ranks
    memory: int = 0  # bytes at the peak, of all its processes
    steps: int = 0  # in a turn
    fp32: dict[str, Any] = field(default_factory=dict)  # how it computes in fp32

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    def against(self, reference: "Measured") -> list[float]:
        """How often it fits into the other's time: turn by turn."""
        return [base / own for own, base in zip(self.seconds, reference.seconds, strict=True)]


class Running:
    """A program that has started and waits for its turn. What it prints goes into a file."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.name = program.name
        self._log = folder / f"{program.name.replace(' ', '-')}.log"
        self._ranks = program.ranks
        self._lines: list[Any] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        # Not in the folder of the run: the path of such a socket may have but a hundred characters.
        self._place = TemporaryDirectory(prefix="bench-")
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(f"{self._place.name}/door")
        self._door.listen()
        with self._log.open("wb") as log:
            for rank, command in enumerate(program.commands):
                environment = {**os.environ, **program.environment, SOCKET: f"{self._place.name}/door"}
                if len(program.commands) > 1:
                    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(program.ranks)}
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def ready(self) -> dict[str, Any]:
        """Waits until all its ranks have taken their first step, and says how they compute in fp32."""
        self._door.settimeout(0.2)
        while len(self._lines) < self._ranks:
            with suppress(TimeoutError):
                self._lines.append(self._door.accept()[0].makefile("rw"))
            if any(process.poll() is not None for process in self._processes):
                self._complain()
        return dict(self._hear()[0]["fp32"])

    def turn(self, steps: int, phases: bool = False) -> dict[str, Any]:
        before = self._cpu()
        for rank in self._lines:
            rank.write(json.dumps({"steps": steps, "phases": phases}) + "\n")
            rank.flush()
        answers = self._hear()
        return {
            "seconds": max(answer["seconds"] for answer in answers) / steps,
            "phases": {
                name: sum(answer["phases"][name] for answer in answers) / len(answers) / steps for name in answers[0]["phases"]
            },
            "cpu": (self._cpu() - before) / steps,
        }

    def _hear(self) -> list[dict[str, Any]]:
        answers = []
        for rank in self._lines:
            line = ""
            with suppress(ConnectionError):
                line = rank.readline()
            answers.append(json.loads(line or self._complain()))
        return answers

    def _complain(self) -> NoReturn:
        last = "\n  ".join(self._log.read_text(errors="replace").strip().splitlines()[-15:])
        raise UserError(f"The benchmark's '{self.name}' has ended:\n  {last}\nHINT: all that it said is in {self._log}.")

    def _all(self) -> list[Path]:
        """Its processes, in /proc: those of the sessions that were started here."""
        sessions = {str(process.pid) for process in self._processes}
        processes = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[3] in sessions:
                    processes.append(stat.parent)
        return processes

    def _cpu(self) -> float:
        total = 0
        for process in self._all():
            with suppress(OSError):
                total += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:13]))
        return total / _TICK

    def memory(self) -> int:
        """The peaks of all its processes; what they share is counted for each."""
        total = 0
        for process in self._all():
            with suppress(OSError):
                for line in (process / "status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        total += int(line.split()[1]) << 10
        return total

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._all():
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
        for started in self._processes:
            started.wait()
        for rank in self._lines:
            rank.close()
        self._door.close()
        self._place.cleanup()


def _warm_up(program: Running, steps: int, least: float) -> int:
    """Leaves turns out until one lasts long enough: so many steps it takes. The first steps may be slow, as they compile."""
    while (seconds := steps * program.turn(steps)["seconds"]) < least:
        steps = math.ceil(steps * min(1.2 * least / seconds, 10))
    return steps


def interleaved(
    programs: Sequence[Program],
    folder: Path,
    turns: int,
    steps: int,
    between: Callable[[], None] | None = None,
    least_seconds: float = 0.0,
) -> dict[str, Measured]:
    """Starts them one after the other, leaves a turn of each out as its warm-up, and lets them take turns.

    Args:
        steps: in a turn, at least.
        between: called after each round.
        least_seconds: that a turn lasts; a program whose steps are shorter takes more of them.
    """
    measured = {program.name: Measured() for program in programs}
    with ExitStack() as stack:
        running = []
        for program in programs:  # one at a time: several that start at once would only be in each other's way
            running.append(stack.enter_context(Running(program, folder)))
            measured[program.name].fp32 = running[-1].ready()
        for process in running:
            measured[process.name].steps = _warm_up(process, steps, least_seconds)
        for _ in range(turns):
            for process in running:
                turn = process.turn(measured[process.name].steps)
                measured[process.name].seconds.append(turn["seconds"])
                measured[process.name].cpu.append(turn["cpu"])
            if between is not None:
                between()
        for process in running:  # apart from the others, because to look is to disturb
            measured[process.name].phases = process.turn(measured[process.name].steps, phases=True)["phases"]
            measured[process.name].memory = process.memory()
    return measured
