"""The verb `same`: `python -m project same RUN [RUN ...]` reports whether runs are the same to the last bit.

Of one run it reports whether steps that were computed twice, as they are after a kill, came out the same. It reads what each
step has left in the runs' folders (`watch/fingerprints.py`). Where two runs' steps are the same, their checkpoints and
logged values are compared, too (`proof/states.py`). Exit code 0: the same, 1: not, 2: it can't be told.

No heavy imports, as long as no checkpoints are read: the answer is there at once.
"""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml

from project.cli.reading import run_parser, show
from project.cluster.settings import differing, likeliest_first, of_the_same_classes
from project.config_files import run_folder, run_names
from project.errors import UserError
from project.untrusted import read_yaml
from project.watch.comparison import Verdict, compare, compare_with_itself, ranks_that_differed, surroundings
from project.watch.fingerprint_file import FILE, Recorded, read
from project.watch.history import BESIDE, lives_of, read_history
from project.watch.history import FILE as LIFE

_ABOUT = """Reports whether runs are the same to the last bit; of one run, whether the steps that it computed twice, as after a
kill, were the same both times. Exit code 0: the same, 1: not the same, 2: not comparable."""
_SHOWN = 20  # settings
_LEFT_OUT = (*BESIDE, "config", "trainer.default_root_dir", "trainer.fingerprints")
_STATES = ("checkpoints/step-*.ckpt", "events.out.tfevents.*")
_CAUSES = {
    "weights": "They are not the ones that the steps moved: an average of them (EMA, SWA), or another buffer.",
    "optimiser states": "The optimiser keeps something that has not moved the weights yet.",
    "schedules": "The learning rates were the same so far, or had no effect.",
    "other states": "It is a state of a callback, of the data, or of the module's on_save_checkpoint.",
    "logged values": "The same weights gave another value: other validation data, other weights than those of the steps (EMA), "
    "or another way to compute it.",
}
_OF_A_STEP = re.compile(
    r"  (?!data\.(?:num_workers|resident|on_error)|model\.(?:channels_last|compile))(?:model|data|seed_everything)\b"
)
"""A line about a setting by which steps differ by more than rounding."""
_PLACES = ("trainer.devices", "trainer.num_nodes")


def main(words: Sequence[str]) -> int:
    """Prints the answer, and returns the exit code."""
    names = run_names(run_parser("same", _ABOUT, nargs="+").parse_args(words).run, FILE)
    folders = [run_folder(name, FILE) for name in names]
    runs = [read(folder, name) for folder, name in zip(folders, names, strict=True)]
    # Where several are compared, it matters of one alone only if it is not the same as itself.
    verdicts = [verdict for verdict in map(_of_one, runs, folders) if len(runs) == 1 or not verdict.same]
    verdicts += [_of_two(runs[0], other, folders[0], folder) for folder, other in zip(folders[1:], runs[1:], strict=True)]
    show("\n".join(line for verdict in verdicts for line in verdict.lines))
    return 0 if all(verdict.same for verdict in verdicts) else 1


def _of_one(run: Recorded, folder: Path) -> Verdict:
    verdict = compare_with_itself(run, read_history(folder, run.name).lives)
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
        settings = _settings(folder, other_folder)
        rounded = verdict.rounded and not any(map(_OF_A_STEP.match, settings))
        around = [*_code(folder, other_folder), *surroundings(*verdict.starts, explain=rounded), *settings]
        verdict.lines += [f"  {line}" for line in around]
    return verdict


def _with_states(recorded: Recorded, other: Recorded, folder: Path, other_folder: Path, verdict: Verdict) -> Verdict:
    """Compares what the checkpoints hold, and what was logged: both may differ where all steps are the same."""
    steps = f"weights and losses of {len(recorded.steps.keys() & other.steps.keys())} steps"
    if not any(all(any(place.glob(what)) for place in (folder, other_folder)) for what in _STATES):
        return Verdict(True, [*verdict.lines, f"  Compared: {steps}; there are no checkpoints and logged values of both."])
    from project.proof.states import compare_states  # PyTorch, which takes seconds to load

    taken, other_taken = recorded.steps[recorded.last], other.steps[other.last]
    compared = compare_states(folder, other_folder, taken.record.ranks == other_taken.record.ranks)
    line = f"  Compared: {', '.join(filter(None, (steps, str(compared))))}."
    if not compared.firsts:
        return Verdict(True, [*verdict.lines, line])
    pair = f"{recorded.name} and {other.name}"
    lines = [f"{pair} are not the same, though all weights and losses of their steps are. What differs:"]
    lines += [f"  After step {entry.step}, {entry}. {_CAUSES[entry.kind]}" for entry in compared.firsts]
    return Verdict(False, [*lines, line], (taken.start, other_taken.start))


def _code(folder: Path, other: Path) -> list[str]:
    """Returns the commits of two runs, where they are known and differ."""
    lives = [lives_of(place / LIFE)[-1:] for place in (folder, other)]
    commits = {life.known.get("commit"): None for end in lives for life in end if life.known.get("commit")}
    return [f"code: commit {', and '.join(map(str, commits))}."] if len(commits) > 1 else []


def _settings(folder: Path, other: Path) -> list[str]:
    """Returns what differs between two runs' configurations, where both have one."""
    paths = [place / "config.yaml" for place in (folder, other)]
    if not all(path.is_file() for path in paths):
        return []
    try:
        changes = likeliest_first(of_the_same_classes(differing([read_yaml(path) for path in paths])))
    except (yaml.YAMLError, OSError, ValueError) as error:
        return [f"Their settings can't be compared: {' '.join(str(error).split())}."]
    texts = {
        key: f"  {key}: {textwrap.shorten(str(value), 80)}, and {textwrap.shorten(str(other_value), 80)}"
        for key, (value, other_value) in changes.items()
        if key not in _LEFT_OUT
    }
    lines = []
    for title, shown in (
        ("Settings that differ", [text for key, text in texts.items() if key not in _PLACES]),
        ("Where they ran", [text for key, text in texts.items() if key in _PLACES]),
    ):
        more = [f"  and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
        lines += [f"{title}:", *shown[:_SHOWN], *more] if shown else []
    return lines
