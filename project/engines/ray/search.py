"""A search under Ray Tune: every trial is a run of its own, with a name, and its keys are flags of the same command."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from project.config_files import option, without
from project.engines.ray.fit import Noted, beside, passed_on, say
from project.engines.ray.local import connected
from project.engines.ray.verb import Asked
from project.errors import UserError
from project.sweep import Sweep, flag, read_sweep

_FAR = 10**9  # validations: a trial ends by its YAML, not by ASHA


def search(asked: Asked) -> int:
    """Tries all, and says which was the best. The exit code: 1 where a trial failed for good."""
    assert asked.search is not None
    sweep = read_sweep(str(asked.search))
    if sweep.metric is None:
        raise UserError(
            f"{asked.search} does not say what the trials are compared by. HINT: metric: val/acc, and mode: max or min"
        )
    noted = Noted()
    noted.listen()
    with connected(asked.address, math.ceil(asked.workers * asked.cpus)) as ray:
        noted.listen()
        from project.engines.ray.places import resources

        needs = {name: value * asked.workers for name, value in resources(ray, asked).items()}
        told = described(asked, sweep)
        _try_it(ray, told, passed_on(asked), sweep, needs, noted)
        return _search(asked, sweep, told, needs, noted)


def described(asked: Asked, sweep: Sweep) -> dict[str, Any]:
    """What a trial has to know of its search. Tune writes it down beside the runs, for all to read: so no environment is in it,
    which may have the keys of a service.
    """
    words = without(asked.words, "--run")  # trials have names of their own
    if asked.workers > 1:
        words.append(f"--trainer.devices={asked.workers}")  # a trial's ranks are on one host, as plain Python starts them
    if option(words, "--checkpoints.monitor") is None:
        words += [f"--checkpoints.monitor={sweep.metric}", f"--checkpoints.mode={sweep.mode}"]  # the best one is kept
    return {
        **{"words": words, "run": asked.run, "folder": str(asked.folder.parent), "cwd": str(asked.cwd)},
        **{"flags": [sweep.words(number + 1) for number in range(len(sweep.trials))], "workers": asked.workers},
        **{"metric": sweep.metric, "grace": asked.grace},
    }


def _try_it(
    ray: Any, told: Mapping[str, Any], environment: dict[str, str], sweep: Sweep, needs: Mapping[str, float], noted: Noted
) -> None:
    """Before anything starts: one step and one validation, where a trial would run, with all values that a key may have."""
    from project.engines.ray.trial import tried

    every = [flag(key, value) for key, values in sweep.extremes.items() for value in values]
    words = [*told["words"], *every, *sweep.words(1), "--trainer.fast_dev_run=true", f"--run={told['run']}-trying"]
    task = ray.remote(tried).options(num_cpus=needs.get("CPU", 0), num_gpus=needs.get("GPU", 0))
    answer = task.remote(dict(told), environment, words)
    while not ray.wait([answer], timeout=0.5)[0]:
        if noted.numbers:
            raise SystemExit(128 + noted.numbers[0])
    if wrong := ray.get(answer):
        raise UserError(f"The search can't begin: {wrong}")


def _search(asked: Asked, sweep: Sweep, told: dict[str, Any], needs: dict[str, float], noted: Noted) -> int:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

    from project.engines.ray.news import News, Until
    from project.engines.ray.trial import Trial

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    early = sweep.stop_early
    scheduler = (
        ASHAScheduler(time_attr="training_iteration", max_t=_FAR, grace_period=early.after, reduction_factor=early.factor)
        if early
        else FIFOScheduler()
    )
    news = News(told, sweep)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(Trial, environment=passed_on(asked)), needs),
        param_space={"number": tune.grid_search(list(range(1, len(sweep.trials) + 1))), "search": told},
        tune_config=tune.TuneConfig(
            metric=sweep.metric, mode=sweep.mode, scheduler=scheduler, max_concurrent_trials=sweep.together,
            trial_dirname_creator=lambda trial: f"trial-{trial.config['number']:05d}",
        ),
        run_config=tune.RunConfig(
            name=f"{asked.run}-ray", storage_path=asked.storage or str(asked.folder.parent), verbose=0, callbacks=[news],
            stop=Until(noted.numbers), failure_config=tune.FailureConfig(max_failures=asked.failures),
        ),
    )  # fmt: skip
    say("INFO", f"Ray: {len(sweep.trials)} trials of {asked.run}, by {sweep.metric} ({sweep.mode})")
    thread, failed = beside(tuner.fit)
    while thread.is_alive():
        thread.join(0.5)  # Python runs the handlers of signals in between
    if failed:
        raise UserError(f"The search came to an end: {failed[0]}")
    best = news.best()
    for line in best:
        say("INFO", line)
    if noted.numbers:
        return 128 + noted.numbers[0]
    return int(bool(news.failed) or not best)
