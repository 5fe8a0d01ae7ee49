"""One training under Ray: its workers run `python -m project fit`, and the driver shows what they say."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from project.engines.ray.local import connected, last_words
from project.engines.ray.verb import Asked
from project.errors import UserError

_LONG = 30.0  # seconds without a place for the workers, after which the user hears of it
_END = 15.0  # seconds for Ray to end what it has started
# Of the driver's environment, these go to the children also where Ray's cluster was started by somebody else. Not PROJECT_NODE
# and PROJECT_IMAGE: where the driver is, the others are not.
_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_", "CUBLAS_", "WANDB_", "MLFLOW_", "PYTHONHASHSEED", "OMP_")


class Noted:
    """The signals that the driver gets; they are for the training."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def listen(self) -> None:
        """Ray sets handlers of its own when it is connected: so this is called after that, too."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)


def say(level: str, text: str) -> None:
    """As the training's own lines look."""
    print(f"{time.strftime('%H:%M:%S')} {level:7} {text}", file=sys.stderr, flush=True)


def passed_on(asked: Asked) -> dict[str, str]:
    """What of this process's environment the children have, too."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    return found | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{asked.grace:g}"}  # the training says if a checkpoint takes longer


def beside(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Calls it in a thread, as the main one hears signals; what it raised is in the list when it has ended."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # it is the main thread that says so
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failed


def fit(asked: Asked) -> int:
    """The training's exit code."""
    noted = Noted()
    noted.listen()
    with connected(asked.address, math.ceil(asked.workers * asked.cpus)) as ray:
        noted.listen()
        return _fit(ray, asked, noted)


def _fit(ray: Any, asked: Asked, noted: Noted) -> int:
    from project.engines.ray.office import Office
    from project.engines.ray.places import resources, train

    needs = resources(ray, asked)
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    office = ray.remote(Office).options(num_cpus=0, max_concurrency=1000, scheduling_strategy=here).remote(asked.failures)
    thread, failed = beside(lambda: train(asked, office, needs, passed_on(asked)))
    idle, told = time.monotonic(), False
    sent = 0
    while True:
        lines, said, busy = _ask(ray, office.hears.remote())
        for stream, text in lines:
            out = sys.stdout if stream == 1 else sys.stderr
            out.buffer.write(text)
            out.flush()
        for level, text in said:
            say(level, text)
        while sent < len(noted.numbers):
            if not ray.get(office.stop.remote(noted.numbers[sent])):
                return 128 + noted.numbers[sent]
            sent += 1
        if not thread.is_alive() and not (lines or said):
            break
        code = ray.get(office.code.remote())
        if busy:
            idle, told = time.monotonic(), False
        elif code is not None and time.monotonic() - idle > _END:
            break  # Ray would go on to look for places
        elif code is None and not told and time.monotonic() - idle > _LONG:
            told = True
            say("WARNING", _waits(asked, needs, ray.available_resources()))
    if (code := ray.get(office.code.remote())) is None:
        raise UserError(f"Ray can't start the workers: {last_words(failed[0]) if failed else 'it said nothing'}")
    return int(code)


def _waits(asked: Asked, needs: dict[str, float], free: Mapping[str, float]) -> str:
    """Why no worker has been started for a while, as far as the driver can tell."""
    many = str(asked.workers) if asked.least == asked.workers else f"{asked.least} to {asked.workers}"
    each = ", ".join(f"{value:g} {name}" for name, value in needs.items())
    there = ", ".join(f"{value:g} {name}" for name in ("CPU", "GPU") if (value := free.get(name))) or "none"
    wanted = f"{many} worker{'s' * (asked.workers > 1)} with {each} each"
    if all(free.get(name, 0.0) >= asked.least * value for name, value in needs.items()):
        why = "that may lie on several hosts, or on one that was lost, which Ray notices after a while"
        return f"Ray has not started {wanted} yet, though {there} are free: {why}. Waiting."
    return f"Ray has no place for {wanted}; free are: {there}. Waiting."


def _ask(ray: Any, reference: Any) -> Any:
    """An answer, while signals are noted: Python runs their handlers between two waits."""
    while not ray.wait([reference], timeout=0.5)[0]:
        continue
    return ray.get(reference)
