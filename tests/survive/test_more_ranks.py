"""Three ranks and more: their sums depend on the order of addition, which two ranks hide. A resumed run must keep it."""

import functools
import signal
from pathlib import Path

import pytest

from tests.conftest import TINY, forked
from tests.survive.test_resume import curves, faults, final, same

pytestmark = pytest.mark.slow

# Gradients that fill more than one of DistributedDataParallel's buckets; a global batch for 1, 2, 3, 4 and 6 ranks.
FIT = (
    *("fit", "--config=configs/ddp.yaml", *TINY, "--data.source.init_args.train_size=250", "--run=it"),
    *("--model.network.init_args.widths=[64,128]", "--data.batch_size=2", "--data.global_batch_size=48"),
    *("--data.crop_padding=2", "--trainer.max_epochs=2", "--checkpoints.every_n_steps=3", "--trainer.val_check_interval=2"),
)
STEPS = 10  # 5 in each epoch


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    @functools.cache
    def run(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"uninterrupted-{ranks}")
        done = forked(folder, *FIT, faults(), ranks=ranks)
        assert done.code == 0, done.output
        return folder

    return run


PLACES = [
    (3, "accumulation", signal.SIGKILL),
    pytest.param(3, "step", signal.SIGTERM, marks=pytest.mark.faults),
    pytest.param(4, "step", signal.SIGKILL, marks=pytest.mark.faults),
    pytest.param(6, "accumulation", signal.SIGTERM, marks=pytest.mark.faults),
]


@pytest.mark.parametrize(("ranks", "where", "number"), PLACES)
def test_resumed_on_as_many_ranks(uninterrupted, quick, tmp_path, ranks, where, number):
    fault = faults({"rank": ranks - 1, "where": where, "step": 7, "number": int(number)})
    struck = quick(*FIT, fault, ranks=ranks)
    assert struck.code != 0
    if number == signal.SIGTERM:
        assert struck.code == 143, struck.output
    resumed = quick(*FIT, fault, ranks=ranks)
    assert resumed.code == 0, resumed.output
    actual, expected = final(tmp_path, STEPS), final(uninterrupted(ranks), STEPS)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "position"):
        assert same(actual[part], expected[part]), part
    assert curves(tmp_path) == curves(uninterrupted(ranks))
