"""One number for all the bits of a tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from project.watch.checksums import Checksums, as_bytes, plain, together

SIZES = (1, 3, 64, 255, 4096, 4097, 8193, 20_000, 300_001)
TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


torch.manual_seed(0)
TENSORS = [torch.randn(size, dtype=dtype) for size in SIZES for dtype in TYPES]
CHECKSUMS = Checksums(TENSORS)


@given(st.data())
def test_a_flipped_bit_in_any_tensor_shows_in_its_number_alone(data):
    before = CHECKSUMS()
    which = data.draw(st.integers(0, len(TENSORS) - 1))
    memory = TENSORS[which].view(torch.uint8)
    memory[data.draw(st.integers(0, len(memory) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert CHECKSUMS.fit(TENSORS)
    after = CHECKSUMS()
    assert (before != after).nonzero().tolist() == [[which]]
    assert together(before) != together(after)


@given(st.sampled_from((300, 8192, 300_001)), st.data())
def test_one_unit_more_here_and_one_less_there(size, data):
    tensor = torch.randn(size)
    before, bits = Checksums([tensor])(), tensor.view(torch.int32)
    first = data.draw(st.integers(0, size - 1))
    # In the same column of its rows, in the same row, or anywhere.
    second = data.draw(st.sampled_from([(first + 512) % size, (first + 2) % size, (first + 1) % size, (first + 12_345) % size]))
    if second != first:
        bits[first] += 1
        bits[second] -= 1
        assert Checksums([tensor])() != before


@pytest.mark.parametrize("size", [300, 8192, 300_000])
def test_values_in_another_order(size):
    tensor = torch.randn(size)
    before = Checksums([tensor])()
    for distance in (1, 2, 512, 1024, size // 2):
        assert Checksums([tensor.roll(distance)])() != before, distance
    assert Checksums([tensor.flip(0)])() != before
    signs = torch.ones(size)
    signs[7], signs[7 + 512 * (size > 1000) + 2] = -1, -1
    tensor[7], tensor[7 + 512 * (size > 1000) + 2] = 2.0, -2.0  # only the highest bits are exchanged
    before = Checksums([tensor])()
    assert Checksums([tensor * signs])() != before
    second = torch.randn(size)
    assert together(Checksums([tensor, second])()) != together(Checksums([second, tensor])())


def test_the_number_is_that_of_the_memory():
    """Of a view, of a layer that lies in another order, of an odd place in a larger memory."""
    tensor = torch.randn(40, 30, 3, 3)
    number = Checksums([tensor])()
    assert Checksums([tensor.clone()])() == number
    assert Checksums([nn.Parameter(tensor)])() == number
    larger = torch.zeros(1 + tensor.numel())
    larger[1:] = tensor.flatten()
    assert Checksums([larger[1:]])() == number
    assert Checksums([torch.stack([tensor, tensor], -1)[..., 0]])() == number  # with gaps
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert Checksums([tensor])() == number
    finally:
        torch.set_num_threads(threads)
    last = tensor.to(memory_format=torch.channels_last)
    checksums = Checksums([last])
    before = checksums()
    assert checksums.fit([last])
    last[3, 2, 1, 0] += 1
    assert checksums() != before, "it looks at the memory, and at no copy"


def test_made_anew_for_other_tensors():
    first, second = torch.randn(10_000), torch.randn(10_000)
    checksums = Checksums([first])
    assert checksums.fit([first])
    assert not checksums.fit([second])
    gaps = torch.randn(100, 2)[:, 0]
    assert not Checksums([gaps]).fit([gaps]), "of a copy"


def test_nothing_and_what_has_no_plain_memory():
    assert Checksums([])().tolist() == []
    assert Checksums([torch.zeros(0), torch.tensor(2.0)])().count_nonzero() == 1
    assert not plain(torch.eye(2).to_sparse())
    assert not plain(torch.empty(2, device="meta"))
    assert not plain(nn.UninitializedParameter())
    assert plain(torch.zeros(2, dtype=torch.bool))


def test_bytes_of_a_number():
    numbers = Checksums([torch.full((9,), float(value)) for value in range(1, 1001)])()
    assert len(as_bytes(numbers, 2)) == 2000
    assert len(set(as_bytes(numbers, 1))) > 240
