"""The comparison of two runs to the last bit: in which step they part, in its forward pass or after it, and in which module.

No heavy imports: this reads two files and needs no PyTorch.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from project.errors import listed
from project.watch.fingerprint_file import Recorded, Start, Taken
from project.watch.history import Life

_ROUNDING = 0.01  # of a loss
_MOST = 100_000  # steps that a start repeats: the files may be somebody else's
_SMALL_LOSS = 0.1  # below it, rounding is a larger share


@dataclass
class Verdict:
    """A verdict, line by line. `starts`: those of both runs, where they part; `rounded`: whether rounding may be why."""

    same: bool
    lines: list[str] = field(default_factory=list)
    starts: tuple[Start, Start] | None = None
    rounded: bool = True


def compare(run: Recorded, other: Recorded) -> Verdict | None:
    """Compares two runs; returns None if there is no step that both have."""
    steps = sorted(run.steps.keys() & other.steps.keys())
    if not steps:
        return None
    begins, other_begins = run.starts[0][0], other.starts[0][0]
    pair = f"{run.name} and {other.name}"
    if begins.names != other_begins.names:
        both = (run.name, begins.names, other_begins.names), (other.name, other_begins.names, begins.names)
        lacking = ((name, [tensor for tensor in names if tensor not in {*others}]) for name, names, others in both)
        parts = [f"only {name} has {listed(left)}" for name, left in lacking if left]
        why = "; ".join(parts) or "their tensors stand in another order"
        return Verdict(False, [f"{pair} are not the same: {why}."], (begins, other_begins))
    if begins.step == other_begins.step and begins.weights != other_begins.weights:
        lines = [
            f"{pair} are not the same: they begin with other weights.",
            f"  {_tensors(begins.names, begins.tensors, other_begins.tensors, run)}",
        ]
        return Verdict(False, lines, (begins, other_begins))
    for step in steps:
        taken, other_taken = run.steps[step], other.steps[step]
        if not same_step(taken, other_taken):
            lines = [f"{pair} are not the same: step {step} (epoch {taken.record.epoch + 1}) is the first that differs."]
            lines += _batches_by_ranks(taken.start, other_taken.start)
            lines += [*_where(run, other, taken, other_taken), *_distance(run.steps[steps[-1]], other.steps[steps[-1]])]
            return Verdict(False, lines, (taken.start, other_taken.start), rounded=not _far_apart(taken, other_taken))
    return Verdict(True, [f"{pair} are the same to the last bit {_how_far(run, other, steps)}."])


def compare_with_itself(run: Recorded, lives: Sequence[Life] = ()) -> Verdict:
    """Compares the steps that a run took more than once, after a kill for example. `lives`: its starts, by which it is known
    how many of these have left no fingerprint: a start that is killed has not written those of its last steps.
    """
    for earlier, later in run.again:
        if not same_step(earlier, later):
            step = later.record.step
            lines = [f"{run.name}: step {step} was computed twice, with different results."]
            return Verdict(False, [*lines, *_where(run, run, earlier, later)], (earlier.start, later.start))
    steps = sorted({later.record.step for _, later in run.again})
    repeated = {
        step
        for before, after in pairwise(lives)
        for step in range(after.step + 1, min(before.end_step, after.step + _MOST) + 1)
    }
    lacking = sorted(repeated - {*steps})
    span = f"{lacking[0]} to {lacking[-1]}, {len(lacking)} steps" if len(lacking) > 1 else f"{lacking}"[1:-1]
    why = "the start that took them first was ended before it had written their fingerprints."
    more = [f"  Not compared, of what was computed twice: {span}; {why}"] * bool(lacking)
    if not steps:
        known = "those that were computed twice can't be compared." if lacking else "none was computed twice."
        return Verdict(True, [f"{run.name}: {len(run.steps)} steps up to {run.last}, and {known}", *more])
    which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, from {steps[0]} to {steps[-1]},"
    were = "was" if len(steps) == 1 else "were"
    return Verdict(True, [f"{run.name}: {which} {were} computed more than once, the same to the last bit each time.", *more])


def ranks_that_differed(run: Recorded) -> list[str]:
    """Reports the first step after which the run itself found a rank whose weights were not rank 0's."""
    for step, taken in sorted(run.steps.items()):
        if taken.record.others:
            ranks = ", ".join(taken.record.others)
            return [f"In {run.name}, rank {ranks} had other weights than rank 0 after step {step}; all should have the same."]
    return []


def surroundings(start: Start, other: Start, explain: bool = True) -> list[str]:
    """Returns what else differs where two runs part. `explain`: say how it may be the cause, as no other is known."""
    lines = []
    if start.micro_batches != other.micro_batches and not _batches_by_ranks(start, other):
        lines.append(
            f"A step has {start.micro_batches} micro-batches, and {other.micro_batches}: other samples, or cut otherwise."
        )
    known: tuple[tuple[str, object, object, str], ...] = (
        ("torch", start.torch, other.torch, "another version has other kernels"),
        ("hardware", start.device, other.device, "on other hardware, sums are rounded otherwise"),
        ("threads", start.threads, other.threads, "an operation of a CPU may split a sum among them; see trainer.threads"),
    )
    lines += [
        f"{what}: {value}, and {other_value}{f': {why}' * explain}."
        for what, value, other_value, why in known
        if value != other_value
    ]
    if start.exact != other.exact:
        lines.append(f"trainer.exact: {start.exact}, and {other.exact}{': it rounds gradients otherwise' * explain}.")
    elif start.ranks != other.ranks:
        hint = (
            ""
            if start.exact or not explain
            else " Sums over ranks are rounded otherwise on each number of them. HINT: trainer.exact: true"
        )
        lines.append(f"ranks: {start.ranks}, and {other.ranks}.{hint}")
    return lines


def _batches_by_ranks(start: Start, other: Start) -> list[str]:
    """Reports where a step has as many micro-batches as ranks, or a multiple: then the runs have other global batches."""
    if start.ranks == other.ranks or start.micro_batches * other.ranks != other.micro_batches * start.ranks:
        return []
    counts = f"{start.micro_batches} micro-batches on {start.ranks} rank(s), and {other.micro_batches} on {other.ranks}"
    return [
        f"  A step has {counts}: it follows from the number of ranks, and so the global batch is another. "
        "HINT: trainer.global_batch_size, the same in both; a module that steps its optimisers by itself needs the same "
        "product of batch_size and ranks.",
    ]


def same_step(taken: Taken, other: Taken) -> bool:
    return taken.record.weights == other.record.weights and not _differing_losses(taken, other)


def _differing_losses(taken: Taken, other: Taken) -> list[int]:
    """Returns the micro-batches whose losses differ. Of a run that failed, those of other ranks than 0 may not be known."""
    losses, other_losses = taken.record.losses, other.record.losses
    return sorted(number for number in losses.keys() & other_losses.keys() if losses[number] != other_losses[number])


def _losses(taken: Taken, other: Taken) -> list[tuple[float, float]]:
    """Returns the losses of the micro-batches that both have, where they are of a type that is known here."""
    losses, other_losses = taken.record.losses, other.record.losses
    kinds = {(4, 4): "<f", (8, 8): "<d"}
    both = [(losses[number], other_losses[number]) for number in sorted(losses.keys() & other_losses.keys())]
    known = [(kinds[len(bits), len(others)], bits, others) for bits, others in both if (len(bits), len(others)) in kinds]
    return [(*struct.unpack(kind, bits), *struct.unpack(kind, others)) for kind, bits, others in known]


def _far_apart(taken: Taken, other: Taken) -> bool:
    """Returns whether the same weights gave a loss that differs by more than rounding, even in bf16, does."""
    return taken.before == other.before and any(
        abs(loss - other_loss) > _ROUNDING * max(abs(loss), abs(other_loss), _SMALL_LOSS)
        for loss, other_loss in _losses(taken, other)
    )


def _distance(taken: Taken, other: Taken) -> list[str]:
    """Reports how far apart two runs are in a step."""
    if not (losses := _losses(taken, other)):
        return []
    means = [sum(column) / len(losses) for column in zip(*losses, strict=True)]
    return [f"  The mean loss of step {taken.record.step}, the last of both, is {means[0]:.9g}, and {means[1]:.9g}."]


def _how_far(recorded: Recorded, other: Recorded, steps: Sequence[int]) -> str:
    last = steps[-1]
    ends = [run for run in (recorded, other) if run.last > last]
    ranks = [run.steps[last].record.ranks for run in (recorded, other)]
    on = f"on {ranks[0]} and {ranks[1]} ranks" if ranks[0] != ranks[1] else f"on {ranks[0]} rank{'s' * (ranks[0] > 1)} each"
    if not ends:
        return f"up to step {last} of both, {on}"
    return f"up to step {last}, {on}; {ends[0].name} goes on to step {ends[0].last}"


def _where(recorded: Recorded, other: Recorded, taken: Taken, other_taken: Taken) -> list[str]:
    """Reports where within a step two runs part."""
    if taken.before != other_taken.before:
        return ["  The weights before this step were others already."]
    if numbers := _differing_losses(taken, other_taken):
        more = f" (and those of {len(numbers) - 1} more)" if len(numbers) > 1 else ""
        by = [f"rank {entry.rank_of(numbers[0])} of {entry.record.ranks}" for entry in (taken, other_taken)]
        who = f"{by[0]} in both" if by[0] == by[1] else f"{by[0]} in the one, {by[1]} in the other"
        what = f"the loss of micro-batch {numbers[0]}{more}"
        far = ["  That is more than rounding: other samples (another order, other data), or another computation."]
        return [
            f"  The weights before it are the same, and {what} is not: it is the forward pass, or its samples.",
            *(far if _far_apart(taken, other_taken) else []),
            f"  Micro-batch {numbers[0]} was computed by {who}.",
            f"  {_modules(recorded, other, taken, other_taken, numbers)}",
        ]
    named = _tensors(taken.start.names, taken.record.tensors, other_taken.record.tensors, recorded)
    if not (taken.record.losses and other_taken.record.losses):
        return [f"  The weights before it are the same, and those after it are not. No loss of it is on record. {named}"]
    return [
        "  The weights before it and all losses in it are the same, and the weights after it are not: it is the backward "
        f"pass or the optimiser. {named}",
    ]


def _modules(recorded: Recorded, other: Recorded, taken: Taken, other_taken: Taken, numbers: Sequence[int]) -> str:
    calls, their_calls = taken.record.modules, other_taken.record.modules
    if not calls or not their_calls:
        common = [(step, entry.record.modules) for step, entry in recorded.steps.items() if step in other.steps]
        alike = [
            step for step, outputs in common
            if outputs and outputs == other.steps[step].record.modules and step < taken.record.step
        ]  # fmt: skip
        known = f" The latest that both have is step {max(alike)}, and there all gave the same." if alike else ""
        return f"What each module gives is recorded in the first step after a start and after every 100th step.{known}"
    if 0 not in numbers:
        return "What each module gives is recorded in micro-batch 0 alone, whose loss is the same."
    for call, (before, after) in enumerate(zip(calls, their_calls, strict=False)):
        if before != after:
            known = f", after {calls[call - 1][0]}, which gave the same" if call else ""
            return f"The first module that gave something else, in micro-batch 0: {after[0]}{known}."
    if len(calls) != len(their_calls):
        return f"{len(calls)} modules were called in the one, {len(their_calls)} in the other."
    return "All modules gave the same in micro-batch 0: it is what is computed from what they give."


def _tensors(names: Sequence[str], checksums: bytes, other_checksums: bytes, run: Recorded) -> str:
    differing = [name for name, checksum, other in zip(names, checksums, other_checksums, strict=False) if checksum != other]
    if not differing:
        return "Which tensors differ is not known."
    text = f"{len(differing)} of {len(names)} tensors differ: {listed(differing)}."
    owner = differing[0].rpartition(".")[0]
    kinds = [name for _, records in run.starts for step in records for name, _ in step.modules if name.startswith(f"{owner} (")]
    return f"{text} The first belongs to {kinds[0]}." if kinds else text
