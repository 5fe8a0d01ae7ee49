"""Configurations that are drawn at random: the same bits on other ranks, and after a kill, whatever is combined with what.

Draws more of them, and prints what differs: python -m tests.train.test_drawn FIRST COUNT.
"""

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from project.checkpoints.reading import SafeCheckpointIO
from tests.conftest import forked
from tests.survive.test_resume import curves, same

CALLBACKS: list[dict[str, Any]] = [
    {"class_path": "tests.drawn_parts.Kicks"},
    {"class_path": "tests.drawn_parts.Meters"},
    {"class_path": "tests.drawn_parts.Unfreezes"},
    *(
        {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": settings}
        for name, settings in (
            ("EMAWeightAveraging", {"decay": 0.9}),
            ("EarlyStopping", {"monitor": "val_loss", "patience": 1}),
            ("LearningRateMonitor", {"logging_interval": "step"}),
            ("ModelCheckpoint", {"monitor": "val_loss", "save_top_k": 2, "dirpath": "mine"}),
        )
    ),
]
PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "position")


def drawn(seed: int) -> dict[str, Any]:
    """Returns a run, the rank and the place at which it is killed, and the numbers of ranks: at first, and after the kill."""
    chance = random.Random(seed)

    def choose(**options: list[Any]) -> dict[str, Any]:
        return {name: chance.choice(values) for name, values in options.items()}

    model = choose(
        optimizer=["SGD", "AdamW", "RMSprop", "NAdam", "Adagrad", "RAdam", "Adadelta"],
        schedule=["none", "exponential", "plateau", "warm restarts", "sequence"],
        interval=["epoch", "step"],
        frequency=[1, 2],
        norm=["none", "layer", "group"],
        dropout=[0.0, 0.2],
        log_by=["step", "epoch", "both", "none"],
        sync=[False, True],
        metric=["object", "computed"],
        draws=[False, True],
        teacher=[False, True],
    )
    data = choose(
        size=[50, 70],
        workers=[0, 0, 1],
        noise=["none", "torch", "numpy", "python"],
        mixes=[False, True],
        loaders=["one", "one", "dict", "min_size", "max_size", "max_size_cycle"],
        tail=[True, False],
    )
    trainer = choose(
        log_every_n_steps=[1, 2],
        max_epochs=[2, 3],
        max_steps=[-1, 7],
        val_check_interval=[1, 1.0],
        limit_train_batches=[1.0, 3],
        limit_val_batches=[1.0, 3],
        num_sanity_val_steps=[0, 2],
        gradient_clip_val=[None, 0.5],
        gradient_clip_algorithm=["norm", "value"],
        precision=["32-true", "64-true"],
        strategy=["ddp", "ddp", "sharded"],
        reload_dataloaders_every_n_epochs=[0, 0, 1],
    )
    callbacks = [callback for callback in CALLBACKS if chance.random() < 0.25]
    kill = choose(rank=[0, 1], step=[1, 2, 3], where=["step", "accumulation", "validation"], number=[9, 15])
    trainer |= {"accelerator": "cpu", "exact": True, "global_batch_size": 12, "callbacks": callbacks}
    return {
        "run": {
            "seed_everything": 7,
            "run": "it",
            "model": {"class_path": "tests.drawn_parts.Net", "init_args": model},
            "data": {"class_path": "tests.drawn_parts.Data", "init_args": data},
            "trainer": trainer,
            "checkpoints": choose(every_n_steps=[1, 2, 50]),
        },
        "kill": kill,
        "ranks": chance.choice([(2, 1), (2, 3), (3, 1), (3, 2)]),
    }


def train(run: dict[str, Any], folder: Path, ranks: int, kill: dict[str, Any] | None = None) -> tuple[int, str]:
    """Trains, or is killed, on some ranks; returns the exit code and the output."""
    folder.mkdir(exist_ok=True)
    fault = [] if kill is None else [{"class_path": "tests.probes.Fault", "init_args": kill}]
    trainer = run["trainer"] | {"callbacks": [*run["trainer"]["callbacks"], *fault]}
    (folder / "run.yaml").write_text(yaml.safe_dump(run | {"trainer": trainer}))
    words = ("--trainer.devices=1",) if ranks == 1 else ()
    done = forked(folder, "fit", "--config=run.yaml", *words, ranks=ranks, PYTHONHASHSEED="0")
    return done.code, done.output


def final(folder: Path) -> tuple[str, Any]:
    newest = max((folder / "lightning_logs/it/checkpoints").glob("step-*.ckpt"))
    return newest.name, SafeCheckpointIO().load_checkpoint(newest)


def differences(folder: Path, reference: Path) -> list[str]:
    """Returns what differs between the ends of two runs."""
    (name, state), (expected_name, expected) = final(folder), final(reference)
    names = [f"{name}, not {expected_name}"] if name != expected_name else []
    actual, before = curves(folder), curves(reference)
    tags = [f"the curve {tag}" for tag in sorted({*actual, *before}) if actual.get(tag) != before.get(tag)]
    return [*names, *(part for part in PARTS if not same(state[part], expected[part])), *tags]


def check(seed: int, place: Path) -> str:
    """Returns what is wrong with a configuration; '' for nothing."""
    case = drawn(seed)
    many, then = case["ranks"]
    code, output = train(case["run"], place / "alone", 1)
    if code:
        return f"on one rank exit code {code}: {output[-2000:]}"
    code, output = train(case["run"], place / "many", many)
    if code or (wrong := differences(place / "many", place / "alone")):
        return f"on {many} ranks exit code {code}: {output[-2000:]}" if code else f"on {many} ranks {wrong}"
    train(case["run"], place / "killed", many, case["kill"])
    code, output = train(case["run"], place / "killed", then, case["kill"])
    if code or (wrong := differences(place / "killed", place / "alone")):
        how = f"killed on {many} ranks ({case['kill']}), resumed on {then}"
        return f"{how}, exit code {code}: {output[-2000:]}" if code else f"{how}: {wrong}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 12, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(14, 34))])
def test_a_run_is_a_function_of_its_yaml(tmp_path: Path, seed: int) -> None:
    assert not check(seed, tmp_path)


def main() -> None:
    first, count = map(int, sys.argv[1:])
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as place:
            print(seed, check(seed, Path(place)) or "the same", flush=True)


if __name__ == "__main__":
    main()
