"""A sum has the same bits in any order, and is as right as float64 makes it."""

import random

import pytest
import torch

from project.exact.sums import ExactSum, WideSum, sum_from_coarsest


def added(terms, *, largest=1.0, ranks=1):
    """As so many ranks add them up: each its share, sent as it is or as a sum on the grid."""
    length = len(terms[0])
    sums = [ExactSum([1, length - 1], [largest, largest], len(terms)) for _ in range(ranks)]
    for number, term in enumerate(terms):
        sums[number % ranks].add(term)
    sent, levels = [], max(rank_sum.count for rank_sum in sums)
    for number, rank_sum in enumerate(sums):
        sent += rank_sum.terms
        if number % 2:
            rank_sum.fold(rank_sum.terms, whole := torch.empty(length, dtype=torch.float64))
            sent[-len(rank_sum.terms) :] = [whole]
    above = [torch.stack(of_ranks).sum(0) for of_ranks in zip(*(rank_sum.coarser(levels) for rank_sum in sums), strict=True)]
    total = torch.empty(length, dtype=torch.float64)
    sums[0].fold(sent, total, coarser=sum_from_coarsest(above[::-1]) if above else None)
    return total


def wide(seed, count, spread):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(500, generator=generator) * 2.0 ** (torch.randn(500, generator=generator) * spread) for _ in range(count)
    ]


@pytest.mark.parametrize("spread", [0, 4, 16, 30])
@pytest.mark.parametrize("largest", [2.0**-40, 1.0, 2.0**30])
def test_any_order_on_any_number_of_ranks(spread, largest):
    terms = wide(1, 24, spread)
    expected = added(terms, largest=largest)
    for ranks in (2, 3, 4, 6, 8):
        random.Random(ranks).shuffle(terms)
        assert torch.equal(added(terms, largest=largest, ranks=ranks), expected)


def test_it_is_closer_than_fp32s_own_additions():
    terms = wide(2, 64, 6)
    exact = torch.stack([term.double() for term in terms]).sum(0)
    plain = torch.zeros(500)
    for term in terms:
        plain += term
    total = added(terms, largest=max(float(term.abs().max()) for term in terms)).float()
    scale = exact.abs() + exact.abs().median()
    assert ((total.double() - exact).abs() / scale).median() <= ((plain.double() - exact).abs() / scale).median()
    assert (total.double() - exact).norm() < (plain.double() - exact).norm()


def test_a_term_that_no_step_before_it_has_let_expect_is_not_cut():
    small, huge = torch.full((3,), 2.0**-30), torch.full((3,), 2.0**90)
    for terms in ([small, huge, -huge, small], [huge, small, small, -huge]):
        assert torch.equal(added(terms, largest=2.0**-28), torch.full((3,), 2.0**-29).double())


def test_terms_that_lie_between_two_multiples_of_the_grid_are_rounded_by_themselves():
    """And not to the even sum, which depends on what came before."""
    count = 24
    half = float(ExactSum([1], [1.0], count)._shift) / 1.5 / 2.0**53
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randint(-99, 99, (500,), generator=generator) * half for _ in range(count)]
    expected = added(terms)
    for seed in range(8):
        random.Random(seed).shuffle(terms)
        assert torch.equal(added(terms, ranks=1 + seed % 3), expected)


@pytest.mark.parametrize("spread", [0, 4, 9])
def test_few_numbers_of_any_size(spread):
    terms, count = wide(3, 24, spread), 24
    scale = torch.stack([term.double() for term in terms]).abs().sum(0)
    totals = []
    for ranks in (1, 3, 8):
        random.Random(ranks).shuffle(terms)
        sums = [WideSum(500, count) for _ in range(ranks)]
        for number, term in enumerate(terms):
            sums[number % ranks].add(term)
        totals.append(sum_from_coarsest(torch.stack([rank_sum.folds for rank_sum in sums]).sum(0)))
    assert all(torch.equal(total, totals[0]) for total in totals)
    assert ((totals[0] - torch.stack([term.double() for term in terms]).sum(0)).abs() <= 2.0**-48 * scale).all()
    too_large = WideSum(1, 2)
    too_large.add(torch.tensor([2.0**41]))
    assert sum_from_coarsest(too_large.folds).isnan()
