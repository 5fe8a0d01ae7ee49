"""The verb `same`: `python -m project same RUN [RUN ...]` reports whether runs are the same to the last bit.

Of one run it reports whether steps that were computed twice, as they are after a kill, came out the same. It reads what each
step has left in the runs' folders (`watch/fingerprints.py`). Where two runs' steps are the same, their checkpoints and
logged values are compared, too (`proof/states.py`). Exit code 0: the same, 1: not, 2: it can't be told.

No heavy imports, as long as no checkpoints are read: the answer is there at once.
"""

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from project.cli.watching import ended
from project.config_files import RUNS, documents, run_folder
from project.errors import UserError
from project.untrusted import printable
from project.watch.comparison import Verdict, compare, compare_with_itself, ranks_that_differed, surroundings
from project.watch.fingerprint_file import FILE, Recorded, read

_ABOUT = """Are these runs the same to the last bit? Of one run: is it the same as itself, where steps were computed twice, as
they are after a kill? Exit code 0: the same, 1: not, 2: it can't be told."""
_SHOWN = 20  # settings
# Of no consequence: what a run is called, where it lies, what it says.
_LEFT_OUT = ("run", "resume", "change", "base", "config", "doctor", "debug", "trainer.default_root_dir", "trainer.fingerprints")
_STATES = ("checkpoints/step-*.ckpt", "events.out.tfevents.*")
_CAUSES = {
    "weights": "They are not the ones that the steps moved: an average of them (EMA, SWA), or another buffer.",
    "optimiser states": "The optimiser keeps something that has not moved the weights yet.",
    "schedules": "The learning rates were the same so far, or had no effect.",
    "other states": "It is a state of a callback, of the data, or of the module's on_save_checkpoint.",
    "logged values": "The same weights gave another value: other validation data, other weights than those of the steps (EMA), "
    "or another way to compute it.",
}
_PLACES = ("trainer.devices", "trainer.num_nodes")


def main(words: Sequence[str]) -> int:
    """Prints the answer, and returns the exit code."""
    parser = argparse.ArgumentParser("python -m project same", description=_ABOUT)
    parser.add_argument("run", nargs="+", metavar="RUN", help=f"the name of a run in {RUNS}/, or the folder of one")
    names = list(dict.fromkeys(parser.parse_args(words).run))
    return ended(lambda: _answer(names))


def _answer(names: Sequence[str]) -> int:
    verdicts = _verdicts(names)
    print(printable("\n".join(line for verdict in verdicts for line in verdict.lines)))
    return 0 if all(verdict.same for verdict in verdicts) else 1


def _verdicts(names: Sequence[str]) -> list[Verdict]:
    folders = [run_folder(name, FILE) for name in names]
    runs = [read(folder, name) for folder, name in zip(folders, names, strict=True)]
    # Where several are compared, it matters of one alone only if it is not the same as itself.
    verdicts = [verdict for verdict in map(_of_one, runs) if len(runs) == 1 or not verdict.same]
    return verdicts + [_of_two(runs[0], other, folders[0], folder) for folder, other in zip(folders[1:], runs[1:], strict=True)]


def _of_one(run: Recorded) -> Verdict:
    verdict = compare_with_itself(run)
    spoilt = ranks_that_differed(run)
    around = surroundings(*verdict.starts) if verdict.starts else []
    return Verdict(verdict.same and not spoilt, [*verdict.lines, *(f"  {line}" for line in around), *spoilt])


def _of_two(recorded: Recorded, other: Recorded, folder: Path, other_folder: Path) -> Verdict:
    verdict = compare(recorded, other)
    if verdict is None:
        spans = [f"{run.name} has {min(run.steps)} to {run.last}" for run in (recorded, other)]
        raise UserError(f"There is no step that both runs have on record: {', '.join(spans)}. HINT: let one of them go on.")
    if verdict.same:
        verdict = _with_states(recorded, other, folder, other_folder, verdict)
    if verdict.starts is not None:
        around = [*surroundings(*verdict.starts), *_settings(folder, other_folder)]
        verdict.lines += [f"  {line}" for line in around]
    return verdict


def _with_states(recorded: Recorded, other: Recorded, folder: Path, other_folder: Path, verdict: Verdict) -> Verdict:
    """Compares what the checkpoints hold, and what was logged: both may differ where all steps are the same."""
    steps = f"weights and losses of {len(recorded.steps.keys() & other.steps.keys())} steps"
    pairs = [[sorted(path.name for path in place.glob(what)) for place in (folder, other_folder)] for what in _STATES]
    if not any(names and other_names for names, other_names in pairs):
        return Verdict(True, [*verdict.lines, f"  Compared: {steps}; there are no checkpoints and logged values of both."])
    from project.proof.states import compare_states  # PyTorch, which takes seconds to load

    taken, other_taken = recorded.steps[recorded.last], other.steps[other.last]
    compared = compare_states(folder, other_folder, taken.record.ranks == other_taken.record.ranks)
    line = f"  Compared: {', '.join(filter(None, (steps, str(compared))))}."
    if not compared.firsts:
        return Verdict(True, [*verdict.lines, line])
    first = (
        f"{recorded.name} and {other.name} are not the same, though all weights and losses of their steps are. What differs:"
    )
    differences = [f"  After step {entry.step}, {entry}. {_CAUSES[entry.kind]}" for entry in compared.firsts]
    return Verdict(False, [first, *differences, line], (taken.start, other_taken.start))


# Settings ------------------------------------------------------------------------------------------------------------


def _settings(folder: Path, other: Path) -> list[str]:
    """Returns what differs between two runs' configurations, where both have one."""
    paths = [place / "config.yaml" for place in (folder, other)]
    if not all(path.is_file() for path in paths):
        return []
    try:
        before, after = documents(["--config", str(paths[0]), "--config", str(paths[1])])
    except (yaml.YAMLError, OSError, ValueError) as error:
        return [f"Their settings can't be compared: {' '.join(str(error).split())}."]
    changes = [change for change in _differences(before, after) if change[0] not in _LEFT_OUT]
    lines = []
    for title, some in (
        ("Settings that differ", [change for change in changes if change[0] not in _PLACES]),
        ("Where they ran", [change for change in changes if change[0] in _PLACES]),
    ):
        texts = [f"{key}: {_short(value)}, and {_short(other_value)}" for key, value, other_value in some[:_SHOWN]]
        texts += [f"and {len(some) - _SHOWN} more"] if len(some) > _SHOWN else []
        lines += [f"{title}:", *(f"  {text}" for text in texts)] if texts else []
    return lines


def _differences(value: Any, other_value: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields what differs, by dotted name. Of another class, all arguments are others: that is one difference."""
    if not (isinstance(value, Mapping) and isinstance(other_value, Mapping)):
        if value != other_value:
            yield name, value, other_value
    elif value.get("class_path") != other_value.get("class_path"):
        yield f"{name}.class_path", value.get("class_path"), other_value.get("class_path")
    else:
        for key in dict.fromkeys([*value, *other_value]):
            yield from _differences(value.get(key), other_value.get(key), f"{name}.{key}" if name else str(key))


def _short(value: Any) -> str:
    return textwrap.shorten(str(value), 80)
