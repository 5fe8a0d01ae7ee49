"""Settings of Lightning's that meet several ranks: the same numbers, or a refusal that names them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from project.errors import UserError
from project.sharded.refusals import prepare_optimizers
from tests.conftest import Cli, forked
from tests.own import Regression
from tests.survive.test_resume import curves

OWN = (
    *("fit", "--data=tests.own.PointsData", "--data.init_args.size=50", "--trainer.max_epochs=2", "--run=it"),
    *("--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1", "--trainer.global_batch_size=12"),
)
PLAIN = (*OWN, "--model=tests.own.Regression")
STATIC = json.dumps({"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"static_graph": True}})


class Thawing(Regression):
    """Its first layer learns from the second epoch on, in the group of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.network[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.network[0].requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, fused=True)


class Freezing(Regression):
    """Freezes a layer in its forward pass in the first epoch, as lightly's SwaVPrototypes do."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.network[0].requires_grad_(self.current_epoch > 0)
        return super().training_step(batch, batch_idx)


class Searching(Regression):
    """LBFGS, whose line search ends where the loss says so."""

    evaluations = 0

    def loss(self, batch: dict[str, Any]) -> Tensor:
        self.evaluations += 1
        return super().loss(batch)

    def on_train_end(self) -> None:
        results = [self.evaluations, *(parameter.double().sum().item() for parameter in self.parameters())]
        Path(f"search-{self.global_rank}.json").write_text(json.dumps(results))

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1, max_iter=4, line_search_fn="strong_wolfe")


class SearchingByItself(Searching):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


def values(folder: Path, tag: str) -> list[float]:
    return [value for name, points in curves(folder).items() if name.startswith(tag) for _, value in points]


def trained(folder: Path, *words: str, ranks: int = 1) -> Path:
    folder.mkdir()
    run = forked(folder, *words, ranks=ranks)
    assert run.code == 0, run.output
    return folder


def test_a_static_graph_accumulates(tmp_path: Path) -> None:
    plain = trained(tmp_path / "usual", *PLAIN, ranks=2)
    static = trained(tmp_path / "static", *PLAIN, f"--trainer.strategy={STATIC}", ranks=2)
    assert values(static, "val_loss") == pytest.approx(values(plain, "val_loss"), rel=1e-6)


@pytest.mark.parametrize("module", ["Searching", "SearchingByItself"])
def test_ranks_search_by_the_loss_of_all(quick: Cli, tmp_path: Path, module: str) -> None:
    """By its own loss a rank would ask more often than the others, or take another step."""
    words = (f"--model=tests.train.test_strategies.{module}", "--data.init_args.batch_size=6")
    run = quick(*OWN, *words, "--trainer.ranks_differ=warn", "--watchdog.at_least=20", ranks=2)
    assert run.code == 0, run.output
    first, second = ((tmp_path / f"search-{rank}.json").read_text() for rank in range(2))
    assert first == second


def test_lbfgs_takes_no_part_of_a_step(quick: Cli) -> None:
    run = quick(*OWN, "--model=tests.train.test_strategies.Searching")
    assert run.code == 2
    assert "LBFGS evaluates the loss of a step again and again, and a step has 6 micro-batches" in run.output
    assert "HINT: set the loader's batch_size 6 times as large" in run.output


@pytest.mark.parametrize("exact", ["false", "true"])
def test_a_run_that_overfits_validates_on_the_same_samples(tmp_path: Path, exact: str) -> None:
    words = (*PLAIN, "--trainer.overfit_batches=2", f"--trainer.exact={exact}", "--trainer.num_sanity_val_steps=0")
    alone, shared = (trained(tmp_path / str(ranks), *words, ranks=ranks) for ranks in (1, 2))
    assert values(shared, "val_loss") == pytest.approx(values(alone, "val_loss"), rel=0.05 if exact == "false" else 0)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_ranks_within_the_program_are_refused(quick: Cli, strategy: str) -> None:
    run = quick(*PLAIN, f"--trainer.strategy={strategy}", "--trainer.devices=1")
    assert run.code == 2, run.output
    assert "--trainer.strategy: trainer.strategy has this process start the ranks (ddp_spawn, " in run.output
    assert "Traceback" not in run.output


def test_a_library_that_is_not_there_is_named(quick: Cli) -> None:
    run = quick(*PLAIN, "--trainer.strategy=xla", "--trainer.devices=1")
    assert run.code == 2, run.output
    assert "The trainer's settings don't work here: Requirement 'torch_xla" in run.output
    assert "Traceback" not in run.output


def test_unused_parameters_are_told_in_a_line(quick: Cli) -> None:
    run = quick(*OWN, "--model=tests.own.Duel", "--data.init_args.batch_size=6", ranks=2)
    assert run.code == 1, run.output
    assert "`strategy='ddp_find_unused_parameters_true'`" in run.output
    assert "Traceback" not in run.output


class Normalised(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def test_batch_norm_over_ranks_is_refused_on_cpus(quick: Cli) -> None:
    model = "--model=tests.train.test_strategies.Normalised"
    run = quick(*OWN, model, "--trainer.sync_batchnorm=true", ranks=2)
    assert run.code == 2, run.output
    assert "works on GPUs alone. HINT: trainer.sync_batchnorm=false" in run.output
    assert "Traceback" not in run.output


def test_an_optimiser_that_steps_on_a_gpu_is_refused_for_weights_on_the_host() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))], capturable=True)
    with pytest.raises(UserError, match="HINT: leave out capturable=true"):
        prepare_optimizers([optimizer], exact=False)


class OwnLayout(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}


def test_an_optimiser_whose_state_has_another_layout_is_not_sharded() -> None:
    with pytest.raises(UserError, match="OwnLayout saves its state in a layout of its own"):
        prepare_optimizers([OwnLayout([nn.Parameter(torch.zeros(2))])], exact=False)


def stepped(parts: list[int], made: Any, dtype: torch.dtype) -> torch.Tensor:
    """Returns 103 weights after four steps, in tensors of these sizes."""
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(5, 103, generator=generator).to(dtype)
    parameters = [nn.Parameter(part.clone()) for part in values.split(parts)]
    optimizer = made(parameters)
    prepare_optimizers([optimizer], exact=True)
    for gradient in gradients:
        for parameter, part in zip(parameters, gradient.split(parts), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


@pytest.mark.parametrize("made", [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam, partial(torch.optim.AdamW, lr=0.1)])
@pytest.mark.parametrize(("dtype", "settings"), [(torch.float32, {}), (torch.float32, {"fused": True}), (torch.bfloat16, {})])
def test_shards_of_a_cpu_are_rounded_as_the_whole_or_refused(made: Any, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    made = partial(made, **settings)
    if settings or dtype == torch.bfloat16:
        with pytest.raises(UserError, match=r"fused SGD for shards|rounds the last values of a tensor otherwise"):
            stepped([103], made, dtype)
    else:
        assert torch.equal(stepped([103], made, dtype), stepped([35, 34, 34], made, dtype))


def test_a_layer_that_learns_later_has_a_momentum(quick: Cli) -> None:
    run = quick(*OWN, "--model=tests.train.test_strategies.Thawing")
    assert run.code == 0, run.output


def test_a_layer_that_a_forward_pass_freezes_and_thaws(tmp_path: Path) -> None:
    """Ranks wait for no gradient that never comes, and sum those of a layer that learns again."""
    losses = []
    for ranks in (1, 2):
        (folder := tmp_path / str(ranks)).mkdir()
        run = forked(folder, *OWN, "--model=tests.train.test_strategies.Freezing", ranks=ranks)
        assert run.code == 0, run.output
        losses.append(dict(curves(folder)["loss_step"]))
    assert losses[0] == pytest.approx(losses[1])


def test_an_epoch_with_a_shorter_last_step_is_validated_after_it(quick: Cli, tmp_path: Path) -> None:
    """Of 25 micro-batches the last is a step by itself; here it would be validated before that one."""
    accumulates = {"class_path": "GradientAccumulationScheduler", "init_args": {"scheduling": {0: 2}}}
    words = [argument for argument in PLAIN if "global_batch_size" not in argument]
    run = quick(*words, "--trainer.callbacks=" + json.dumps([accumulates]))
    assert run.code == 0, run.output
    assert [step for step, _ in curves(tmp_path)["val_loss/dataloader_idx_0"]] == [13, 26]
