"""The order of samples: a permutation, the same micro-batches for any number of ranks, and no cost at any size."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from project.data.order import MicroBatchSampler, Order, permute

seeds = st.integers(0, 2**31)


@given(st.integers(2**20, 10**12), seeds)
def test_a_position_can_be_reached_alone(size, seed):
    positions = np.array([0, 1, size // 2, size - 1])
    together = permute(positions, size, seed, 3)
    alone = [int(permute(positions[i : i + 1], size, seed, 3)[0]) for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4
    assert all(0 <= sample < size for sample in alone)


def test_seed_and_epoch_change_the_order():
    orders = {tuple(permute(np.arange(100), 100, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_samples_land_everywhere_equally_often():
    size, epochs = 16, 4000
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), permute(np.arange(size), size, 7, epoch)] += 1
    expected = epochs / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 225 + 6 * (2 * 225) ** 0.5  # 15 x 15 degrees of freedom, six standard deviations


orders = st.builds(
    Order,
    size=st.integers(2, 2000),
    micro_batch=st.integers(1, 40),
    micro_batches=st.integers(1, 16),
    seed=st.one_of(st.none(), st.integers(0, 100)),
    tail=st.sampled_from(["keep", "drop"]),
)


def micro_batches(order: Order, epoch: int = 0) -> list[list[list[int]]]:
    return [
        [order.indices((epoch, step, number)).tolist() for number in range(order.micro_batches)] for step in range(order.steps)
    ]


@given(orders)
@settings(max_examples=200)
def test_every_sample_once(order):
    samples = [sample for step in micro_batches(order) for batch in step for sample in batch]
    assert len(samples) == len(set(samples))
    if order.tail == "keep":
        assert sorted(samples) == list(range(order.size))
    else:
        assert order.size - len(samples) < order.global_batch


@given(orders)
@settings(max_examples=200)
def test_no_micro_batch_is_too_small_or_too_large(order):
    lengths = [len(batch) for step in micro_batches(order) for batch in step]
    if order.size >= 2 * order.micro_batches:
        assert all(min(2, order.micro_batch) <= length <= order.micro_batch + 2 for length in lengths)
    assert all(length == order.micro_batch for length in lengths[: -2 * order.micro_batches])


@given(orders)
@settings(max_examples=200)
def test_weights_make_the_mean_over_samples(order):
    for step, batches in enumerate(micro_batches(order)):
        values = [np.array(batch, dtype=float) ** 2 for batch in batches]
        weighted = [order.weight(step, i) * v.mean() if len(v) else 0.0 for i, v in enumerate(values)]
        assert np.mean(weighted) == pytest.approx(np.concatenate(values).mean())


@given(orders, st.sampled_from([1, 2, 4, 8]), st.integers(0, 3))
@settings(max_examples=100)
def test_the_ranks_share_a_step_whatever_their_number(order, world_size, epoch):
    if order.micro_batches % world_size:
        return
    whole = micro_batches(order, epoch)
    shared = [[[] for _ in range(order.micro_batches)] for _ in range(order.steps)]
    for rank in range(world_size):
        sampler = MicroBatchSampler(order, rank, world_size)
        sampler.set_epoch(epoch)
        keys = list(sampler)
        assert len(keys) == len(sampler)
        rank_order = replace(order, share=order.micro_batches // world_size)
        for key in keys:
            shared[key[1]][key[2]] = rank_order.indices(key).tolist()
    assert shared == whole


@given(st.integers(1, 500), st.integers(1, 50), st.integers(1, 16))
def test_an_evaluation_sees_every_sample_once_in_equally_many_batches(size, batch, world_size):
    order = Order(size, batch, world_size)
    per_rank = [list(MicroBatchSampler(order, rank, world_size)) for rank in range(world_size)]
    assert len({len(keys) for keys in per_rank}) == 1
    samples = [i for keys in per_rank for key in keys for i in order.indices(key).tolist()]
    assert sorted(samples) == list(range(size))


def test_a_billion_samples_take_no_memory():
    order = Order(10**9, 64, 1024, seed=1)
    tracemalloc.start()
    order.indices((5, order.steps // 2, 1000))
    next(iter(MicroBatchSampler(order, 1023, 1024)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
