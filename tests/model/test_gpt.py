"""The GPT: what it may look at, what decays, and that it learns more of real text than counting pairs of bytes does.

That its runs are the same on any number of ranks, killed or not, is in tests/train/test_own.py.
"""

import math
import re

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from project.model.gpt import GPT, LanguageModel

TINY = {"vocabulary": 16, "context": 8, "layers": 2, "heads": 2, "width": 16}


@pytest.fixture
def network():
    torch.manual_seed(0)
    return GPT(**TINY, dropout=0.5).eval()


def test_no_token_is_told_what_follows(network):
    tokens = torch.randint(16, (4, 8))
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 16
    before, after = network(tokens), network(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()  # and each is told what was before


def test_it_knows_nothing_at_first(network):
    loss = torch.nn.functional.cross_entropy(network(torch.randint(16, (64, 8))).flatten(0, 1), torch.randint(16, (512,)))
    assert loss.item() == pytest.approx(math.log(16), rel=0.02)


def test_what_does_not_fit_is_refused(network):
    with pytest.raises(ValueError, match=r"9 tokens are more than the network's context of 8\. HINT"):
        network(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"multiple of 3"):
        GPT(width=16, heads=3)


def test_lightnings_own_trainer_trains_it(tmp_path):
    """Matrices decay and others don't; every parameter is in one group; the schedule ends with the run."""
    module = LanguageModel(**TINY, lr=0.1, warmup_steps=2, weight_decay=0.3)
    tokens = torch.randint(16, (12, 9))
    data = DataLoader([(row[:-1], row[1:]) for row in tokens], batch_size=2)
    trainer = Trainer(
        max_epochs=2, default_root_dir=tmp_path, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(module, data, data)
    (optimizer,) = trainer.optimizers
    in_groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, in_groups)) == sorted(map(id, module.parameters()))
    for group in optimizer.param_groups:
        assert group["params"]
        assert all((parameter.ndim >= 2) == (group["weight_decay"] == 0.3) for parameter in group["params"])
    assert [round(group["lr"], 9) for group in optimizer.param_groups] == [0, 0]
    assert trainer.callback_metrics.keys() >= {"train/loss", "val/loss"}


@pytest.mark.slow
@pytest.mark.faults
def test_it_learns_more_than_pairs_of_bytes(quick):
    run = quick("fit", "--config=configs/gpt.yaml")
    assert run.code == 0, run.output
    bigram = float(re.findall(r"bigram model ([\d.]+)", run.output)[0])
    reached = float(re.findall(r"val/loss ([\d.]+)", run.output)[-1])
    assert reached < bigram - 0.3, run.output
