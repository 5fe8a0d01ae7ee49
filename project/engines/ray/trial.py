"""One trial of a search: a run of its own, as a child process; what it logs at its validations is reported to Ray Tune."""

import signal
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import tune

from project.engines.ray.child import Child
from project.engines.ray.ledger import STOPPED, shown
from project.engines.ray.worker import at_usual_priority, environment_of
from project.errors import WRONG
from project.watch.curves import Events
from project.watch.history import OURS

_TURN = 0.5  # seconds from one look at the run's curves to the next
_KEPT = 20  # lines of what it printed last


def words_of(search: Mapping[str, Any], number: int) -> list[str]:
    """A trial's command line."""
    return [*search["words"], *search["flags"][number - 1], "--run", name_of(search, number)]


def name_of(search: Mapping[str, Any], number: int) -> str:
    """A trial's run."""
    return f"{search['run']}-{number}"


class Said:
    """What a child has printed last; its own words for an error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)

    def __call__(self, stream: int, text: bytes) -> None:
        self._lines.extend(text.decode(errors="replace").splitlines())

    def why(self) -> str:
        """The error, without its time."""
        errors = [line.partition(" ERROR ")[2].strip() for line in self._lines if " ERROR " in line]
        return errors[-1] if errors else self._lines[-1] if self._lines else "it said nothing"


class Trial(tune.Trainable):  # type: ignore[misc]
    """`setup` begins the run, or goes on with it: by its name. A step is a validation: where a run went on, Tune hears of all
    that it has logged before, too. So what Tune decides does not depend on which trial was killed, and when.
    """

    def setup(self, config: dict[str, Any], environment: dict[str, str]) -> None:
        """Starts the child. `environment` comes by Ray's memory, and `config` is written down."""
        search = config["search"]
        self._search, self._told = search, 0
        at_usual_priority()
        self._folder = Path(search["folder"]) / name_of(search, config["number"])
        self._events, self._said = Events(self._folder), Said()
        environment = environment_of(environment, search["workers"])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
            environment.pop(name, None)
        self._child = Child(words_of(search, config["number"]), environment, Path(search["cwd"]), self._said)

    def step(self) -> dict[str, Any]:
        """The next validation: its metrics, and the step that it was made at."""
        while True:
            over = self._child.ended.wait(_TURN)  # before it is looked what there is: all is written then
            self._events.read()
            points = self._points()
            if len(points) > self._told:
                self._told += 1
                point = points[self._told - 1]
                return {**self._beside(point.step), self._search["metric"]: point.value, "step": point.step}
            if over:
                return self._ends()

    def _points(self) -> list[Any]:
        """Of the metric that decides. A run that went on has logged a step again that it had logged before."""
        return list({one.step: one for one in self._curve(self._search["metric"])}.values())

    def _curve(self, tag: str) -> list[Any]:
        try:
            return list(self._events.scalars(tag))
        except KeyError:  # nothing yet
            return []

    def _beside(self, step: int) -> dict[str, float]:
        """What else was logged up to this step."""
        tags = [tag for tag in self._events.read() if not tag.startswith(OURS)]
        curves = {tag: [one.value for one in self._curve(tag) if one.step <= step] for tag in tags}
        return {tag: values[-1] for tag, values in curves.items() if values}

    def _ends(self) -> dict[str, Any]:
        code = self._child.wait()
        if code == 0 and self._told:
            return {"done": True, "__duplicate__": True}  # Tune's word for a result that it knows already
        if code == 0:
            raise RuntimeError(f"the run has ended, and has not logged {self._search['metric']}")
        if code in STOPPED:
            raise RuntimeError(f"it was told to stop ({shown(code)})")
        why = f"{self._said.why()} ({shown(code)})"
        if code == WRONG:  # the next time, too: this is an end that Tune does not try again
            return {"done": True, self._search["metric"]: float("nan"), "step": -1, "failed": why}
        raise RuntimeError(why)

    def cleanup(self) -> None:
        """Tune stops it, early or for good: it saves, and another search or fit of this name goes on there."""
        self._child.signal(signal.SIGTERM)
        if not self._child.ended.wait(self._search["grace"]):
            self._child.signal(signal.SIGKILL)
        self._child.wait()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """The run has its own."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """It goes on by its name."""


def tried(search: Mapping[str, Any], environment: dict[str, str], words: list[str]) -> str:
    """A step and a validation with these words, where a trial would run: what is wrong, or nothing."""
    said = Said()
    at_usual_priority()
    with tempfile.TemporaryDirectory() as folder:
        words = [*words, f"--trainer.default_root_dir={folder}"]
        code = Child(words, environment_of(environment, 1), Path(search["cwd"]), said).wait()
    return "" if code == 0 else said.why()
