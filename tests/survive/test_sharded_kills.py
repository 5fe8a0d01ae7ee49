"""One sharded run that is killed many times, and goes on with other numbers of ranks: the same to the last bit, and nothing
that was saved is lost.
"""

import itertools
import json
import random
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from project.checkpoints.files import checkpoints_in, read_manifest
from project.checkpoints.reading import SafeCheckpointIO
from tests.conftest import Run, forked
from tests.own import write_texts
from tests.survive.kills import PLACES
from tests.survive.test_resume import curves, same
from tests.train.test_sharded import EMA, EXACT, GATHER, RUNS, sharded, weights

SAVED, VALIDATED = 2, 3  # every so many steps
FIT = {
    "regression": (
        *RUNS["regression"],
        *("--trainer.max_epochs=8", f"--trainer.val_check_interval={VALIDATED}", f"--checkpoints.every_n_steps={SAVED}"),
    ),
    "gpt": (*RUNS["gpt"], "--trainer.max_steps=45", f"--checkpoints.every_n_steps={SAVED}"),
}
STEPS = {"regression": 48, "gpt": 45}
LEARNED = ("state_dict", "optimizer_states", "lr_schedulers", "position", "current_model_state", "averaging_state")


@dataclass
class Strike:
    """As tests.survive.kills.Kill takes it."""

    where: str = ""
    step: int = 0
    rank: int = 0
    all: bool = False


def start(name: str, folder: Path, ranks: int, strategy: str, strike: Strike) -> Run:
    for left in (*folder.glob("rank-*"), folder / "began", folder / "killed"):
        left.unlink(missing_ok=True)
    kill = {"class_path": "tests.survive.kills.Kill", "init_args": asdict(strike)}
    plugged = "--trainer.callbacks=" + json.dumps([GATHER, EMA, kill])
    return forked(folder, *FIT[name], EXACT, *([strategy] if strategy else []), plugged, ranks=ranks)


def newest(folder: Path) -> int:
    """The step of the newest checkpoint that has its name, which must be whole; 0 where there is none."""
    found = checkpoints_in(folder / "lightning_logs/it/checkpoints")
    return read_manifest(found[-1])["position"]["global_step"] if found else 0


def final(folder: Path) -> dict:
    return SafeCheckpointIO().load_checkpoint(checkpoints_in(folder / "lightning_logs/it/checkpoints")[-1])


def anywhere(chance: random.Random, at: int, ranks: int, where: str, strategy: str) -> Strike:
    """Somewhere in the steps that come next."""
    step = at + chance.choice([0, 1, 2, 3])
    if where == "validation":
        step = -(-(at + 1) // VALIDATED) * VALIDATED
    elif where in ("write", "named"):
        step = at + 1
    alone = where == "named" or (where == "write" and "Sharded" not in strategy)  # rank 0 does it for all
    return Strike(where, step, 0 if alone else chance.randrange(ranks), chance.random() < 0.7)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("regression", 20),
        ("gpt", 20),
    ],
)
def test_kills_on_one_to_four_ranks(tmp_path, name, kills):
    write_texts(tmp_path / "texts")
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()
    chance = random.Random(15)
    worlds = [(1, sharded()), (2, sharded()), (3, sharded()), (4, sharded()), (2, "--trainer.strategy=ddp")]
    struck: Counter[str] = Counter()
    at = 0
    for (ranks, strategy), where in zip(itertools.cycle(worlds), shuffled(chance, kills), strict=False):
        strike = anywhere(chance, at, ranks, where, strategy)
        run = start(name, folder, ranks, strategy, strike)
        said = f"{strike} on {ranks} ranks, {strategy}: {run.output}"
        assert run.code, said
        assert (folder / "killed").exists(), said
        began = (folder / "began").read_text()
        assert int(began) == at, said
        assert ("Goes on from" in run.output) == (at > 0), said
        struck[f"{where} of {'all' if strike.all else 'one'} on {ranks}"] += 1
        noted = [int(line) for line in (folder / "saved").read_text().splitlines()] if (folder / "saved").exists() else [0]
        at = newest(folder)
        assert at >= noted[-1], said
    assert struck.total() == kills
    assert at < STEPS[name]
    run = start(name, folder, 3, sharded(), Strike())
    assert run.code == 0, run.output
    assert int((folder / "began").read_text()) == at

    assert start(name, whole, 1, "", Strike()).code == 0
    ours, theirs = weights(folder), weights(whole)
    assert ours.pop("spread")
    assert not theirs.pop("spread")
    assert same(ours, theirs)
    for part in LEARNED:
        assert same(final(folder)[part], final(whole)[part]), part
    assert curves(folder) == curves(whole)
    print(f"\n{kills} SIGKILLs ({dict(struck)}): bitwise the same run")


def shuffled(chance: random.Random, count: int) -> list[str]:
    """Each place as often as the others."""
    places = [PLACES[number % len(PLACES)] for number in range(count)]
    chance.shuffle(places)
    return places
