"""A GPU that has no memory, hangs or fails, and NCCL that gives up: who it was is named, with an exit code."""

import signal

import pytest

from tests.conftest import Cli
from tests.standin.test_runs import DDP, fault, plugged

pytestmark = pytest.mark.slow


def test_a_device_without_memory_is_named(gpu: Cli) -> None:
    run = gpu(*DDP, plugged(fault(rank=1, step=3, how="allocate")), ranks=2)
    assert run.code == 1, run.output
    assert "OutOfMemoryError" in run.output
    assert "HINT: the micro-batch does not fit. Set data.batch_size lower" in run.output


ENDLESS = (
    *(*DDP, "--trainer.limit_val_batches=1", "--watchdog.at_least=3"),
    *("--trainer.max_epochs=1000", "--trainer.max_steps=100000"),
)


@pytest.mark.parametrize(("how", "step"), [("hang", 21), ("abort", 5)])  # the watchdog knows by then how long a step is
def test_a_rank_that_hangs_or_gives_up_is_named(gpu: Cli, how: str, step: int) -> None:
    run = gpu(*ENDLESS, plugged(fault(rank=1, step=step, how=how)), ranks=2)
    assert run.code == 75, run.output
    if how == "abort":
        assert "lost another rank: NCCL communicator was aborted on rank 1" in run.output
    else:
        assert "The run hangs: rank 1" in run.output
        assert "Its device has not got to nccl:" in run.output
        assert "The run hangs: rank 0" not in run.output


@pytest.mark.parametrize(("how", "step"), [pytest.param("hang", 21, marks=pytest.mark.faults), ("abort", 5)])
def test_so_is_one_with_the_other_nccl(gpu_program: Cli, how: str, step: int) -> None:
    """Its recorder does not tell who hangs, only that somebody does."""
    fails = plugged(fault(rank=1, step=step, how=how))
    run = gpu_program(*ENDLESS, fails, "--trainer.devices=2", gpus=2, TORCH_DIST_USE_NCCL2="1")
    assert run.code == 75, run.output
    message = "lost another rank: NCCL communicator was aborted after a previous error" if how == "abort" else "The run hangs:"
    assert message in run.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_error_of_a_device_that_fails_is_kept(gpu: Cli, ranks: int) -> None:
    """NCCL's own thread meets the same error, and aborts the process: before Python has met it, or while it says so."""
    fails = plugged(fault(rank=ranks - 1, step=5, how="assert"))
    run = gpu(*ENDLESS, fails, ranks=ranks)
    assert run.code in ((1, -signal.SIGABRT) if ranks == 1 else (1, 75)), run.output
    assert "device-side assert triggered" in run.output
    if run.code == 1 if ranks == 1 else "was ended by SIGABRT" not in run.output:
        assert "in on_train_batch_start" in run.output
        assert "AcceleratorError" in run.output
        assert "During handling of the above exception" not in run.output
