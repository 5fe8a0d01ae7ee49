"""Gradients of several ranks have the bits that one rank gives them, however they travel."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from project.exact import gradients as exact_gradients
from project.exact.gradients import ExactGradients

RANKS, STEPS = 3, 3


class Mixed(nn.Module):
    """Large parameters and small ones, of several types; one lies in another order, one is used at times, one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small = nn.Linear(90, 70), nn.Linear(70, 5)
        self.image = nn.Conv2d(10, 40, 4).to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.randn(5, 1000, dtype=torch.float64))
        self.bf16 = nn.Parameter(torch.randn(5, 900, dtype=torch.bfloat16))
        self.at_times, self.never = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, number):
        torch.manual_seed(number)
        output = self.small(self.large(torch.randn(8, 90)).tanh())
        images = torch.randn(2, 10, 6, 6).to(memory_format=torch.channels_last)
        output = output + self.image(images).mean()
        if number % 4 == 1:
            output = self.at_times(output)
        # What no step before it has let expect: a term that is too large for the grid.
        scale = 2.0**40 if number % 7 == 3 else 1.0
        return (output.double() @ self.wide).sum() * scale + (output.bfloat16() @ self.bf16).float().square().mean()


def gradients(micro_batches, rank=0, ranks=1):
    """Of each step: the share of this rank goes through the network here."""
    module, results = Mixed(), []
    sums = ExactGradients(module, micro_batches, ranks)
    for step in range(STEPS):
        numbers = range(rank, micro_batches, ranks)
        for number in numbers:
            sums.begin(last=number == numbers[-1])
            module(step * micro_batches + number).backward()
            sums.end()
        sums.finish()
        results.append(
            {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None}
        )
    sums.close()
    return results


def on_a_rank(rank, place):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=RANKS)
    results = {}
    for swaps in (True, False):
        exact_gradients._ADD_ON_HOST = {"cpu"} if swaps else set()
        for each in (1, 2, 4):
            results[swaps, each] = gradients(RANKS * each, rank, RANKS)
    torch.save(results, f"{place}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(on_a_rank, (str(place),), RANKS, start_method="forkserver")
    return [torch.load(place / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("each", [1, 2, 4])
@pytest.mark.parametrize("swaps", [True, False], ids=["swapped", "reduced"])
def test_three_ranks_have_the_bits_of_one(of_ranks, swaps, each):
    torch.set_num_threads(1)
    expected = gradients(RANKS * each)
    assert {"wide", "bf16", "image.weight"} <= set(expected[0])
    assert "never.weight" not in expected[0]
    for results in of_ranks:
        for reference, values in zip(expected, results[swaps, each], strict=True):
            assert reference.keys() == values.keys()
            assert all(torch.equal(reference[name], values[name]) for name in reference), [
                name for name in reference if not torch.equal(reference[name], values[name])
            ]
            assert all(reference[name].stride() == values[name].stride() for name in reference)


def test_it_is_the_mean_of_the_micro_batches():
    module, count = Mixed(), 6
    expected = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in module.named_parameters()}
    for number in range(count):
        module.zero_grad()
        module(number).backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                expected[name] += parameter.grad.double() / count
    result = gradients(count)[0]
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name].to(value.dtype), msg=name)
