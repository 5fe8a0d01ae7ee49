"""What the start and the end of an epoch do, to weights, groups, schedules and curves, a resumed run does too, and once."""

import json
import signal
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule

from project.step.epochs import _copy_states
from tests.conftest import forked
from tests.survive.test_resume import FIT, assert_same_run, final, same

pytestmark = pytest.mark.slow

PLATEAU = (
    "--model.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau",
    *("--model.lr_scheduler.monitor=train/loss", "--model.lr_scheduler.patience=0", "--model.lr_scheduler.threshold=0.5"),
)


def callbacks(*chosen: dict | str) -> str:
    """A command-line word that plugs in these, and stops by SIGTERM."""
    given = [{"class_path": entry} if isinstance(entry, str) else entry for entry in chosen]
    return "--trainer.callbacks=" + json.dumps(given)


def stop(*steps: int, where: str = "step") -> list[dict]:
    made = [{"step": step, "where": where, "number": int(signal.SIGTERM)} for step in steps]
    return [{"class_path": "tests.probes.Fault", "init_args": arguments} for arguments in made]


def lightnings(name: str, **settings: object) -> dict:
    return {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": settings}


CASES = {
    "unfrozen": (
        ["tests.probes.Backbone", lightnings("LearningRateMonitor", logging_interval="epoch")],
        ["--model.optimizer=tests.probes.LearningOnly", "--model.lr_scheduler=torch.optim.lr_scheduler.ConstantLR"],
    ),
    "swa": (
        [lightnings("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2)],
        ["--model.lr_interval=epoch"],
    ),
    "plateau-epoch": (
        ["tests.probes.Logs", lightnings("LearningRateMonitor", logging_interval="step")],
        [*PLATEAU, "--model.lr_interval=epoch"],
    ),
    "plateau-step": (["tests.probes.Logs"], [*PLATEAU, "--model.lr_interval=step"]),
    "ema": ([lightnings("EMAWeightAveraging", decay=0.9)], []),
}


MARKED = [  # the others' callbacks are in test_stock.py and in test_exact_runs.py, too
    pytest.param(case, ranks, marks=() if ranks == 2 and case in ("unfrozen", "plateau-step") else pytest.mark.faults)
    for case in CASES
    for ranks in (1, 2, 3)
]


@pytest.mark.parametrize(("case", "ranks"), MARKED)
def test_stopped_again_and_again(quick, tmp_path, case, ranks, request):
    """Within an epoch, at its start, where a validation has just been, and in one."""
    given, settings = CASES[case]
    words = [*FIT, *settings, "--data.batch_size=4", "--data.global_batch_size=24", "--data.source.init_args.train_size=194"]
    whole = tmp_path / "whole"
    whole.mkdir()
    done = forked(whole, *words, callbacks(*given), ranks=ranks)
    assert done.code == 0, done.output
    places = [*stop(8, 21), *stop(13, where="validation")]
    if request.config.getoption("--faults"):
        places += stop(6, 10, 19)
    if case == "swa":
        places += stop(24)  # at the start of the epoch that gathers batch norm's statistics
    for _ in places:
        stopped = quick(*words, callbacks(*given, *places), ranks=ranks)
        assert stopped.code == 143, stopped.output
    resumed = quick(*words, callbacks(*given, *places), ranks=ranks)
    assert resumed.code == 0, resumed.output
    assert_same_run(tmp_path, whole)
    states, expected = final(tmp_path)["callbacks"], final(whole)["callbacks"]
    assert all(same(states[name], state) for name, state in expected.items())
    for text in ("already exist", "Traceback"):
        assert text not in resumed.output


@pytest.mark.parametrize("exact", ["false", pytest.param("true", marks=pytest.mark.faults)])
def test_a_layer_that_is_unfrozen_within_an_epoch_learns_from_all_ranks(tmp_path, exact):
    """DistributedDataParallel knows the parameters of the moment that it was made in: the ranks' weights would part."""
    words = (
        callbacks({"class_path": "tests.probes.UnfreezesWithin", "init_args": {"part": "network.layers.0"}}),
        f"--trainer.exact={exact}",
    )
    done = forked(tmp_path, *FIT, *words, "--trainer.max_epochs=1", ranks=2)
    assert done.code == 0, done.output


def test_weights_that_a_module_leaves_out_of_its_state_are_not_missed():
    """`strict_loading` is False, as Lightning has it for a frozen part that is not saved."""

    class Partly(LightningModule):
        def __init__(self):
            super().__init__()
            self.strict_loading, self.head, self.frozen = False, torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

        def state_dict(self, *args, **kwargs):
            return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "frozen" not in name}

    module = Partly()
    before = module.head.weight.clone()
    put_back = _copy_states(SimpleNamespace(lightning_module=module, optimizers=[], lr_scheduler_configs=[]), [])
    torch.nn.init.zeros_(module.head.weight)
    put_back()
    assert torch.equal(module.head.weight, before)
