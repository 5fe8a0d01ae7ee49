"""A search under Ray Tune: every trial is a run of its own, with a name; its keys are flags of the same command."""

import argparse
import logging
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

from project.config_files import option, without
from project.engines.ray.cluster import last_line, say
from project.engines.ray.fit import STOPPED, passed_on, resources, shown
from project.engines.ray.supervisor import Supervisor
from project.errors import WRONG, UserError
from project.sweep import Sweep, flag
from project.watch.curves import Events

_FAR = 10**9  # validations: a trial ends by its YAML, not by ASHA


def run_of(options: argparse.Namespace, number: int) -> Path:
    """Returns the folder of a trial's run; its name is the run's."""
    return Path(options.folder).with_name(f"{options.name}-{number}")


class Trial(tune.Trainable):  # type: ignore[misc]
    """A trial. `setup` begins or resumes its run, by its name. A step is a validation: where a run was resumed, Tune is given
    all that it has logged before, too. So what Tune decides does not depend on which trial was killed, and when.
    """

    def setup(
        self, config: Mapping[str, int], options: argparse.Namespace, sweep: Sweep, environment: Mapping[str, str]
    ) -> None:
        """Starts the process. Its environment, which may have the key of a service, comes by Ray's memory: Tune writes `config`
        into a file for all to read.
        """
        run, self._metric, self._grace = run_of(options, config["number"]), sweep.metric, options.grace
        self._events, self._reported, self._supervisor = Events(run), 0, Supervisor()
        words = [*options.words, *sweep.words(config["number"]), "--run", run.name]
        self._supervisor.start(words, environment, options.workers, options.cwd)

    def step(self) -> dict[str, object]:
        """Returns the next validation: its metric, and the step that it was made at."""
        while True:
            _, code = self._supervisor.poll()
            curve = self._events.scalars(self._metric) if self._metric in self._events.read() else ()
            points = {point.step: point.value for point in curve}  # a resumed run may log a step again
            if len(points) > self._reported:
                step = list(points)[self._reported]
                self._reported += 1
                return {self._metric: points[step], "step": step}
            if code is not None:
                return self._end(code)

    def _end(self, code: int) -> dict[str, object]:
        if code == 0 and self._reported:
            return {"done": True, "__duplicate__": True}  # Tune's key for a result that it knows already
        why = f"{self._supervisor.why()} ({shown(code)})"
        if code == WRONG:  # the next time, too: this is an end that Tune does not try again
            return {"done": True, self._metric: float("nan"), "step": -1, "failed": why}
        if code in {0, *STOPPED}:
            why = f"the run has ended ({shown(code)}), and has not logged {self._metric} to the end"
        raise RuntimeError(why)

    def cleanup(self) -> None:
        """Stops the process, early or for good: it saves, and another search or fit of this name resumes it."""
        end = time.monotonic() + self._grace
        _, code = self._supervisor.poll([signal.SIGTERM])
        while code is None:
            _, code = self._supervisor.poll([signal.SIGKILL] if time.monotonic() > end else [])

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Does nothing: the run has its own checkpoints."""

    def load_checkpoint(self, checkpoint: object) -> None:
        """Does nothing: the run is resumed by its name."""


class Progress(tune.Callback, tune.Stopper):  # type: ignore[misc]
    """Prints a line for each validation and each end of a trial, and remembers the best. When a signal has come, it ends all
    trials: each saves, and is resumed when the search is started again.
    """

    def __init__(self, options: argparse.Namespace, sweep: Sweep, signals: Sequence[int]) -> None:
        self._options, self._sweep, self._signals = options, sweep, signals
        self._values: dict[int, dict[int, float]] = {}
        self.failed: set[int] = set()

    def __call__(self, trial_id: str, result: object) -> bool:
        """Returns whether to end this trial alone: never."""
        return False

    def stop_all(self) -> bool:
        """Returns whether to end all trials; Tune calls this at each turn."""
        return bool(self._signals)

    def on_trial_result(
        self, iteration: int, trials: object, trial: "tune.experiment.Trial", result: Mapping[str, float], **_: object
    ) -> None:
        """Prints a validation once, also where a trial was started again."""
        number, metric = trial.config["number"], self._sweep.metric
        values = self._values.setdefault(number, {})
        if "failed" in result:
            self._fail(number, result["failed"])
        elif metric in result and result["step"] not in values:
            values[int(result["step"])] = result[metric]
            self._say(number, f"  step {result['step']}  {metric} {result[metric]:.4f}")

    def on_trial_complete(self, iteration: int, trials: object, trial: "tune.experiment.Trial", **_: object) -> None:
        """Prints the end of a trial that did not fail."""
        number = trial.config["number"]
        if number not in self.failed:
            self._say(number, f"  ends after step {max(self._values.get(number, {0: 0.0}))}")

    def on_trial_error(self, iteration: int, trials: object, trial: "tune.experiment.Trial", **_: object) -> None:
        """Prints why a trial failed more often than it may."""
        line = last_line(trial.get_error() or trial.get_pickled_error() or RuntimeError("it vanished"))
        self._fail(trial.config["number"], line.partition("Error: ")[2] or line)

    def _fail(self, number: int, why: object) -> None:
        self.failed.add(number)
        self._say(number, f" failed: {why}", "ERROR")

    def _say(self, number: int, text: str, level: str = "INFO") -> None:
        say(level, run_of(self._options, number).name + text)

    def best(self) -> bool:
        """Prints the best trial: its name, its keys, and its checkpoint; returns whether there is any."""
        sign = 1 if self._sweep.mode == "min" else -1
        finished = {number: values for number, values in self._values.items() if number not in self.failed}
        rated = [(sign * value, number, step) for number in finished for step, value in finished[number].items()]
        rated = [entry for entry in rated if entry[0] == entry[0]]  # no NaN
        if rated:
            value, number, step = min(rated)
            run = run_of(self._options, number)
            checkpoints = sorted((run / "checkpoints").glob("step-*.ckpt"))
            named = [file for file in checkpoints if file.name.startswith(f"step-{step:09d}")]
            say("INFO", f"best        {run.name}: {self._sweep.metric} {sign * value:.4f} at step {step}")
            say("INFO", f"keys        {' '.join(self._sweep.words(number))}")
            say("INFO", f"checkpoint  {[run, *checkpoints, *named][-1]}")
        return bool(rated)


def _try_values(options: argparse.Namespace, environment: Mapping[str, str], words: Sequence[str]) -> str:
    """Takes a step and a validation with these words, and returns what is wrong with them, or nothing."""
    supervisor, code = Supervisor(), None
    with tempfile.TemporaryDirectory() as folder:
        supervisor.start([*words, f"--trainer.default_root_dir={folder}"], environment, options.workers, options.cwd)
        while code is None:
            _, code = supervisor.poll()
    return supervisor.why() if code else ""


def search(options: argparse.Namespace, sweep: Sweep, signals: Sequence[int]) -> int:
    """Trains all trials, and prints which was the best; returns 1 where a trial failed for good."""
    options.words = without(options.words, "--run")
    if options.workers > 1:
        options.words.append(f"--trainer.devices={options.workers}")  # on one host, as plain Python starts them
    if option(options.words, "--checkpoints.monitor") is None:  # the best one is kept
        options.words += [f"--checkpoints.monitor={sweep.metric}", f"--checkpoints.mode={sweep.mode}"]
    needs = {name: value * options.workers for name, value in resources(options).items()}
    environment, progress = passed_on(options.grace), Progress(options, sweep, signals)
    every = [flag(key, value) for key, values in sweep.extremes.items() for value in values]
    words = [*options.words, *every, *sweep.words(1), "--trainer.fast_dev_run=true", f"--run={options.name}-trying"]
    task = ray.remote(_try_values).options(num_cpus=needs.get("CPU", 0), num_gpus=needs.get("GPU", 0))
    answer = task.remote(options, environment, words)
    while not ray.wait([answer], timeout=0.5)[0]:
        if signals:
            return 128 + signals[0]
    if wrong := ray.get(answer):
        raise UserError(f"The search can't begin: {wrong}")

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    scheduler = FIFOScheduler()
    if sweep.stop_early:
        after, factor = sweep.stop_early
        scheduler = ASHAScheduler(time_attr="training_iteration", max_t=_FAR, grace_period=after, reduction_factor=factor)
    trial = tune.with_parameters(Trial, options=options, sweep=sweep, environment=environment)
    tuner = tune.Tuner(
        tune.with_resources(trial, needs), param_space={"number": tune.grid_search(list(range(1, len(sweep.trials) + 1)))},
        tune_config=tune.TuneConfig(
            metric=sweep.metric, mode=sweep.mode, scheduler=scheduler, max_concurrent_trials=sweep.together,
            trial_dirname_creator=lambda trial: f"trial-{trial.config['number']:05d}",
        ),
        run_config=tune.RunConfig(
            name=f"{options.name}-ray", storage_path=options.storage or str(options.folder.parent), verbose=0,
            callbacks=[progress], stop=progress, failure_config=tune.FailureConfig(max_failures=options.max_failures),
        ),
    )  # fmt: skip
    say("INFO", f"Ray: {len(sweep.trials)} trials of {options.name}, by {sweep.metric} ({sweep.mode})")
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(tuner.fit)
        while not wait([done], 0.5).done:  # Python runs the handlers of signals in between
            continue
    if error := done.exception():
        raise UserError(f"The search came to an end: {error}")
    complete = progress.best() and not progress.failed
    return 128 + signals[0] if signals else int(not complete)
