"""The one training that is started on hosts and under Slurm, and the check that it is the same run as on one process."""

import json
from pathlib import Path

from tests.conftest import TINY, Run

EPOCHS = 5
# A global batch that one, two and three ranks can make.
FIT = (
    *("fit", "--config=configs/ddp.yaml", *TINY, "--data.source.init_args.train_size=250", "--checkpoints.every_n_steps=3"),
    *("--data.batch_size=4", "--data.global_batch_size=24", f"--trainer.max_epochs={EPOCHS}"),
)
STEPS = 10 * EPOCHS  # the last samples of an epoch make no global batch


# Supervised ranks, two of which are killed.
RECOVER = (
    "--recover.restarts=3",
    "--recover.every_n_steps=2",
    "--checkpoints.every_n_steps=50",  # so that what they resume from is in memory
    "--trainer.callbacks="
    + json.dumps(
        [{"class_path": "tests.probes.Fault", "init_args": {"rank": rank, "step": step}} for rank, step in ((1, 7), (0, 25))]
    ),
)


def slowly(every: float, rank_1: float = 0.0, disk: float = 0.0, crawl_from: int | None = None) -> str:
    """A command-line word: seconds that all ranks wait before each micro-batch, that rank 1 waits besides, and that a
    checkpoint takes to write. The ranks note where they are. All is fast from when there is a file 'hurry', which a test makes
    that needs the run to last: from the step `crawl_from` on a micro-batch takes a quarter of a second, and a tenth more
    in each further step. From 25 on, the rest takes two ranks two minutes.
    """
    probes = [
        ("Ledger", {"pause": every, "crawl_from": crawl_from}),
        ("Ledger", {"pause": rank_1, "rank": 1}),
        ("SlowDisk", {"seconds": disk}),
    ]
    chosen = [(name, init) for name, init in probes if next(iter(init.values()))]
    return "--trainer.callbacks=" + json.dumps(
        [{"class_path": f"tests.probes.{name}", "init_args": init} for name, init in chosen]
    )


def step(folder: Path) -> int:
    """The step that rank 0 of a slow run has come to."""
    ledger = folder / "ledger-0.jsonl"
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("}") else 0


def assert_same_curve(folder: Path, expected: dict[int, float]) -> None:
    """One run, one curve: no step is missing or there twice."""
    points = Run(0, "", folder).events("train/loss")
    assert [number for number, _ in points] == list(range(1, STEPS + 1))
    assert max(abs(value - expected[number]) for number, value in points) < 1e-4
