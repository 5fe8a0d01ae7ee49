"""A search: every trial of a sweep is a training of its own, and those that lag behind are stopped early (ASHA)."""

import argparse
import math
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from project.config_files import RUNS, option, without
from project.errors import UserError
from project.launch.ray.cluster import say
from project.launch.ray.fit import STOPPED, Fit, shown
from project.launch.sweep import Sweep, flag
from project.watch.curves import Curves

_TURN = 0.5  # seconds from one look at the trials' curves to the next
_AT_ONCE = 256  # trials that are trained, or wait for room, where the sweep sets no limit: each takes a thread here
_KEPT = 20  # lines of what a trial printed last


class Trial(Fit):
    """A run of its own in a folder of its own. Where it is resumed, the search is given all that it has logged before, too. So
    what the search decides does not depend on which trial was killed, and when.
    """

    patience = math.inf

    def __init__(
        self, options: argparse.Namespace, number: int | str, root: Path, words: Sequence[str], signals: list[int]
    ) -> None:
        self.name, self.signals = f"{options.name}-{number}", signals
        self.folder = root / RUNS / self.name
        own = vars(options) | {"name": self.name, "folder": self.folder, "words": [*words, "--run", self.name]}
        super().__init__(argparse.Namespace(**own), self.signals)
        self.values: dict[int, float] = {}
        """The metric by step."""
        self.failed = False
        self._curves, self._tail = Curves(self.folder), deque[str](maxlen=_KEPT)

    def say(self, level: str, text: str) -> None:
        """Prints what is more than information, with the trial's name."""
        if level != "INFO":
            say(level, f"{self.name}  {text}")

    def show(self, stream: int, text: bytes) -> None:
        """Keeps what the trial has printed last."""
        self._tail.extend(text.decode(errors="replace").splitlines())

    def validations(self, metric: str) -> Iterator[tuple[int, float]]:
        """Yields the step and the metric of each new validation; a resumed run may log one again."""
        for point in self._curves.read().get(metric, ()):
            if point.step not in self.values:
                self.values[point.step] = point.value
                yield point.step, point.value

    def why(self, code: int) -> str:
        """Returns the trial's own last error, without its time, or else its last line."""
        errors = [line.partition(" ERROR ")[2].strip() for line in self._tail if " ERROR " in line]
        return f"{[*(self._tail or ['it printed nothing']), *errors][-1]} ({shown(code)})"

    def end(self, code: int, metric: str) -> None:
        """Prints how the trial has ended."""
        stopped = bool(code in STOPPED and self.signals)
        self.failed = not (stopped or (code == 0 and self.values))
        if self.failed:
            why = self.why(code) if code else f"the run has ended, and has not logged {metric}"
            say("ERROR", f"{self.name} failed: {why}")
        elif self.values:
            say("INFO", f"{self.name}  ends after step {max(self.values)}")


def search(options: argparse.Namespace, sweep: Sweep, signals: list[int]) -> int:
    """Trains all trials, and prints which was the best; returns 1 where a trial failed for good."""
    words, metric = without(options.words, "--run"), sweep.metric
    if option(words, "--checkpoints.monitor") is None:
        words += [f"--checkpoints.monitor={metric}", f"--checkpoints.mode={sweep.mode}"]  # the best one is kept
    every = [flag(key, value) for key, values in sweep.extremes.items() for value in values]
    _try_words(options, [*words, *every, *sweep.words(1)], signals)
    numbers = range(1, len(sweep.trials) + 1)
    trials = [Trial(options, number, options.root, [*words, *sweep.words(number)], []) for number in numbers]
    say("INFO", f"Ray: {len(trials)} trials of {options.name}, by {metric} ({sweep.mode})")
    sign, passed = (1 if sweep.mode == "min" else -1), 0
    rungs: dict[int, list[float]] = {}
    with ThreadPoolExecutor(sweep.together or min(len(trials), _AT_ONCE)) as pool:
        running = {trial: pool.submit(trial.run) for trial in trials}
        while running:
            time.sleep(_TURN)
            new = signals[passed:]
            passed += len(new)
            for trial, run in list(running.items()):
                trial.signals += new
                ended = run.done()  # before its curve is read
                for step, value in trial.validations(metric):
                    say("INFO", f"{trial.name}  step {step}  {metric} {value:.4f}")
                    if not trial.signals and _lags(rungs, sweep.stop_early, len(trial.values), sign * value):
                        trial.signals.append(signal.SIGTERM)  # it saves, and another search or fit of this name resumes it
                if ended:
                    del running[trial]
                    trial.end(run.result(), metric)
    rated = [
        (sign * value, number, step)
        for number, trial in zip(numbers, trials, strict=True)
        for step, value in trial.values.items()
        if not (trial.failed or math.isnan(value))
    ]
    if rated:
        value, number, step = min(rated)
        best = trials[number - 1]
        checkpoints = sorted(best.folder.glob("checkpoints/step-*.ckpt"))
        say("INFO", f"best        {best.name}: {metric} {sign * value:.4f} at step {step}")
        say("INFO", f"keys        {' '.join(sweep.words(number))}")
        exact = [file for file in checkpoints if file.name.startswith(f"step-{step:09d}")]
        say("INFO", f"checkpoint  {[best.folder, *checkpoints, *exact][-1]}")
    failed = not rated or any(trial.failed for trial in trials)
    return 128 + signals[0] if signals else int(failed)


def _lags(rungs: dict[int, list[float]], rule: tuple[int, int] | None, validations: int, loss: float) -> bool:
    """Returns whether a trial is not among the best 1/factor of those that came to this rung before (asynchronous halving)."""
    if rule is None:
        return False
    rung, factor = rule
    while rung < validations:
        rung *= factor
    if rung > validations:
        return False
    before = rungs.setdefault(validations, [])
    lags = bool(before and loss > np.nanquantile(before, 1 / factor))
    before.append(loss)
    return lags


def _try_words(options: argparse.Namespace, words: Sequence[str], signals: list[int]) -> None:
    """Has one step and one validation taken where a trial would run, with all values that a key may have."""
    once = argparse.Namespace(**vars(options) | {"max_failures": 0})
    options.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".trying-", dir=options.root) as root:  # all hosts see it
        extra = [f"--trainer.default_root_dir={root}", "--trainer.fast_dev_run=true"]
        trial = Trial(once, "trying", Path(root), [*words, *extra], signals)
        code = trial.run()
    if signals:
        raise SystemExit(128 + signals[0])
    if code:
        raise UserError(f"The search can't begin: {trial.why(code)}")
