"""Goodput: which share of the time since a run's first process it has trained, and where the rest of it went."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise

from project.watch.history import Life


@dataclass(frozen=True)
class Goodput:
    """Holds the seconds of a run since its first process was started, by what they were spent on."""

    training: float
    starting: float
    """From the start of the first process to the first step."""
    recovering: float
    """The same, of the starts that followed another one."""
    repeated: float
    """Steps that were taken again, as they came after the state from which the run resumed."""
    not_running: float
    """Between a stop and the next start of a process."""

    @property
    def elapsed(self) -> float:
        """Returns all of them: a run's time, in each place that tells it."""
        return float(sum(astuple(self)))

    @property
    def shares(self) -> dict[str, float]:
        """Returns the shares of the whole time; {} where there is none."""
        whole = self.elapsed
        return {field.name.replace("_", " "): getattr(self, field.name) / whole for field in fields(self)} if whole > 0 else {}

    def __str__(self) -> str:
        """Returns the share of training and, in parentheses, what has cost the rest."""
        shares = self.shares
        rest = [f"{share:.1%} {name}" for name, share in shares.items() if share >= 0.0005 and name != "training"]
        return (f"{shares['training']:.1%} training" + f" ({', '.join(rest)})" * bool(rest)) if shares else ""


def goodput(lives: Sequence[Life]) -> Goodput:
    """Returns what the time since a run's first process was started was spent on."""
    begins = [life.began for life in lives]
    starts = [life.time - begin for life, begin in zip(lives, begins, strict=True)]
    repeated = down = 0.0
    for at, (before, after) in enumerate(pairwise(lives), 1):
        starts[at] = max(0.0, after.time - max(begins[at], before.end))  # a spare process is older than the loss
        down += max(0.0, begins[at] - before.end)
        if (again := before.end_step - after.step) > 0:
            repeated += before.seconds * min(1.0, again / max(1, before.end_step - before.step))
    trained = sum(life.seconds for life in lives)
    return Goodput(max(0.0, trained - repeated), sum(starts[:1]), sum(starts[1:]), repeated, down)
