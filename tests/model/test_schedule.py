"""WarmupCosine: up in a line, down in half a cosine."""

import pytest
import torch

from project.model import WarmupCosine


def rates(warmup, total, steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = WarmupCosine(optimizer, warmup, total)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return values


def test_warm_up_then_cosine():
    values = rates(4, 24, 25)
    assert values[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert values[14] == pytest.approx(1.0)
    assert values[24] == pytest.approx(0.0)
    assert values[4:] == sorted(values[4:], reverse=True)


def test_it_stays_at_zero_after_the_end():
    assert rates(0, 5, 8)[5:] == pytest.approx([0.0] * 3)


def test_negative_warm_up_is_refused():
    with pytest.raises(ValueError, match="warmup_steps"):
        rates(-1, 5, 1)
