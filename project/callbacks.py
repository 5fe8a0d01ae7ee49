"""The callbacks that every run has, and their order."""

from collections.abc import Iterable, Sequence

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint as AnyCheckpoint
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from lightning.pytorch.loggers import Logger

from project.checkpoints.callback import Checkpoints, SaveFirst
from project.checkpoints.monitored import Monitored
from project.exact.batch_norm import StepStatistics
from project.resume.finders import SearchOnce
from project.resume.moves import MicroBatchMoves
from project.resume.rehearsal import Rehearsal
from project.step.chance import ChanceByMicroBatch
from project.step.compression import CompressGradients, Compression
from project.survive.failure import cause_of
from project.survive.hang.watchdog import Watchdog
from project.survive.nonfinite import Act, NonFinite
from project.survive.preemption import StopTogether
from project.survive.signals import SIGNALS
from project.watch.dashboard import Dashboard
from project.watch.events import Events
from project.watch.fingerprints import Fingerprints, WhenRanksDiffer
from project.watch.life import Life
from project.watch.pictures import Pictures
from project.watch.predictions import PredictionWriter
from project.watch.profile import Profile
from project.watch.progress import Progress
from project.watch.throughput import Throughput


def with_ours(
    given: Sequence[Callback] | Callback | None,
    wanted: Sequence[type[Callback]],
    nonfinite: Act,
    compression: Compression,
    exact: bool,
    fingerprints: bool,
    records: bool,
    ranks_differ: WhenRanksDiffer,
) -> list[Callback]:
    """Returns the user's callbacks, and ours where the user has none of the kind.

    Args:
        given: the user's callbacks.
        wanted: the kinds that may be left out, and are not.
        records: whether the starts and stops are written.
        nonfinite, compression, exact, fingerprints, ranks_differ: the Trainer's arguments.
    """
    callbacks = _listed(given)
    for kind in wanted:
        alike = {Progress: AnyProgressBar, Checkpoints: AnyCheckpoint}.get(kind, kind)
        if not any(isinstance(callback, alike) for callback in callbacks):
            callbacks.append(made := kind())
            if isinstance(made, Checkpoints):
                made.by_default = True
    if compression != "none":
        callbacks.append(CompressGradients(compression))

    def those(kind: type[Callback]) -> list[Callback]:
        return [callback for callback in callbacks if isinstance(callback, kind)] or [kind()]

    watchdogs, dashboards, (profile, *_) = those(Watchdog), those(Dashboard), those(Profile)
    assert isinstance(profile, Profile)
    # First, so that what the others do counts as progress or as a hang, and not as what was before.
    before = [*watchdogs, SaveFirst(), SearchOnce(), NonFinite(nonfinite)]
    before += [StepStatistics(exact), ChanceByMicroBatch(), Monitored(), MicroBatchMoves()]
    # Last, when nobody changes the weights of this step any more.
    after = [PredictionWriter(), StopTogether(SIGNALS, profile), *dashboards, Pictures()]
    after += [Rehearsal(), *([Fingerprints(exact, ranks_differ)] if fingerprints else []), profile]
    if records and not any(isinstance(callback, Life) for callback in callbacks):
        before.append(Life(cause_of))
    return [*before, *(callback for callback in callbacks if callback not in [*watchdogs, *dashboards, profile]), *after]


def default_kinds(progress: bool | None, checkpoints: bool | None, bare: bool) -> list[type[Callback]]:
    """Returns the kinds of callbacks that a run has unless they are switched off."""
    switches = ((Progress, progress), (Checkpoints, checkpoints), (Throughput, None))
    return [kind for kind, switch in switches if switch is not False and not bare]


def keeps_records(
    callbacks: Sequence[Callback] | Callback | None, logger: Logger | Iterable[Logger] | bool | None, checkpoints: bool | None
) -> bool:
    """Returns whether this project's logger or `Checkpoints` is active; fingerprints are useful only then."""
    others = [callback for callback in _listed(callbacks) if isinstance(callback, AnyCheckpoint)]
    saves = checkpoints is not False and all(isinstance(callback, Checkpoints) for callback in others)
    loggers = logger if isinstance(logger, (list, tuple)) else [logger]
    return saves or any(entry in (None, True) or isinstance(entry, Events) for entry in loggers)


def _listed(callbacks: Sequence[Callback] | Callback | None) -> list[Callback]:
    return [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
