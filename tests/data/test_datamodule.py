"""How a global batch is made up of micro-batches, ranks and accumulation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from project.data import ImageData


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_accumulation_makes_up_the_global_batch(batch, world_size, count):
    data = ImageData(batch_size=batch, global_batch_size=batch * world_size * count)
    assert data.accumulation(world_size, "auto") == count
    assert data.accumulation(world_size, count) == count
    with pytest.raises(ValueError, match=f"accumulate_grad_batches={count}"):
        data.accumulation(world_size, count + 1)


def test_plain_accumulation_works_without_a_global_batch():
    assert ImageData(batch_size=8).accumulation(4, 3) == 3
    assert ImageData(batch_size=8).accumulation(4, "auto") == 1


def test_a_world_size_that_does_not_fit_is_told_which_do():
    with pytest.raises(ValueError, match=r"ranks that fit: 1, 2, 4, 8; nearest global batch for 3 rank\(s\): 144"):
        ImageData(batch_size=16, global_batch_size=128).accumulation(3, "auto")


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"num_workers": -1}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ImageData(**wrong)
