"""What a search says while it goes on, and at its end."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import tune

from project.engines.ray.fit import say
from project.engines.ray.trial import name_of
from project.sweep import Sweep
from project.untrusted import read_json


class Until(tune.Stopper):  # type: ignore[misc]
    """Ends all trials when a signal has come: each saves, and goes on when the search is started again."""

    def __init__(self, signals: Sequence[int]) -> None:
        self._signals = signals

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Not one alone."""
        return False

    def stop_all(self) -> bool:
        """Tune asks at each turn."""
        return bool(self._signals)


class News(tune.Callback):  # type: ignore[misc]
    """A line for each validation and each end of a trial."""

    def __init__(self, told: Mapping[str, Any], sweep: Sweep) -> None:
        self._told, self._sweep = told, sweep
        self._seen: dict[int, dict[int, float]] = {}
        self.failed: set[int] = set()

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        """Said once for each step, also where a trial was started again."""
        number, metric = trial.config["number"], self._sweep.metric
        seen = self._seen.setdefault(number, {})
        if "failed" in result:
            self.failed.add(number)
            say("ERROR", f"{name_of(self._told, number)} failed: {result['failed']}")
            return
        if metric in result and result["step"] not in seen:
            seen[result["step"]] = result[metric]
            say("INFO", f"{name_of(self._told, number)}  step {result['step']}  {metric} {result[metric]:.4f}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """At its end, or where it was stopped."""
        if (number := trial.config["number"]) in self.failed:
            return
        last = max(self._seen.get(number, {0: 0.0}))
        say("INFO", f"{name_of(self._told, number)}  ends after step {last}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """It failed more often than it may."""
        number = trial.config["number"]
        self.failed.add(number)
        lines = str(trial.get_error() or trial.get_pickled_error() or "").strip().splitlines() or ["it vanished"]
        say("ERROR", f"{name_of(self._told, number)} failed: {lines[-1].partition('Error: ')[2] or lines[-1]}")

    def best(self) -> list[str]:
        """The best trial: its name, its keys, and its checkpoint."""
        sign = 1 if self._sweep.mode == "min" else -1
        rated = [
            (sign * value, number, step)
            for number, seen in self._seen.items()
            for step, value in seen.items()
            if value == value and number not in self.failed
        ]
        if not rated:
            return []
        value, number, step = min(rated)
        folder = Path(self._told["folder"]) / name_of(self._told, number)
        keys = " ".join(self._told["flags"][number - 1])
        lines = [f"best        {name_of(self._told, number)}: {self._sweep.metric} {sign * value:.4f} at step {step}"]
        return [*lines, f"keys        {keys}", f"checkpoint  {self._checkpoint(folder, step)}"]

    def _checkpoint(self, folder: Path, step: int) -> Path:
        """The one of that step, or what is left of the run: the newest."""
        there = sorted((folder / "checkpoints").glob("step-*.json"))
        for manifest in there:
            with suppress(OSError, ValueError, AttributeError):
                if read_json(manifest).get("position", {}).get("global_step") == step:
                    return manifest.with_suffix(".ckpt")
        return there[-1].with_suffix(".ckpt") if there else folder
