"""Tally: the mean over samples, whatever batches they came in."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import multiclass_accuracy

from project.model.tally import Tally, means


@pytest.mark.parametrize("cuts", [[100], [1, 99], [30, 0, 70]])
def test_batches_do_not_matter(cuts):
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(100, 10, generator=generator), torch.randint(0, 10, (100,), generator=generator)
    tally = Tally()
    for part, target in zip(logits.split(cuts), labels.split(cuts), strict=True):
        tally.update(part, target, cross_entropy(part, target))
    assert tally.total().tolist() == tally.total().tolist()
    values = tally.compute()
    torch.testing.assert_close(values["loss"].float(), cross_entropy(logits, labels))
    for name, top_k in (("acc", 1), ("acc5", 5)):
        expected = multiclass_accuracy(logits, labels, num_classes=10, average="micro", top_k=top_k)
        torch.testing.assert_close(values[name].float(), expected)


def test_top_five_of_five_classes_says_nothing():
    tally = Tally()
    tally.update(torch.randn(4, 5), torch.tensor([0, 1, 2, 3]), torch.tensor(1.0))
    assert set(tally.compute()) == {"loss", "acc"}


def test_an_epoch_of_which_every_step_was_skipped_has_no_means():
    assert means(torch.zeros(4).tolist(), 5) == {}
