"""Micro-batches from any dataset: whole batches where it can, image by image where not."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from project.data.batches import MicroBatches, MicroBatchLoader
from project.data.in_memory import InMemory, whole
from project.data.order import MicroBatchSampler, Order
from project.data.synthetic import SyntheticImages


class OneByOne:
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 10

    def __getitem__(self, index):
        array = np.full((4, 6, 3), index, dtype=np.uint8)
        image = {"pil": Image.fromarray, "array": lambda a: a, "grey": lambda a: a[:, :, 0], "tensor": self.tensor}[self.kind]
        return image(array), index % 3

    @staticmethod
    def tensor(array):
        return torch.from_numpy(array).permute(2, 0, 1)


@pytest.mark.parametrize("kind", ["pil", "array", "grey", "tensor"])
def test_images_of_any_kind_become_uint8_chw(kind):
    batch = MicroBatches(OneByOne(kind), Order(10, 4, 1))[0, 1, 0]
    assert batch["image"].dtype == torch.uint8
    assert batch["image"].shape == (4, 1 if kind == "grey" else 3, 4, 6)
    assert batch["image"][:, 0, 0, 0].tolist() == [4, 5, 6, 7]
    assert batch["label"].tolist() == [1, 2, 0, 1]
    assert batch["sample"].tolist() == [4, 5, 6, 7]


class Counting(SyntheticImages):
    calls = 0

    def __getitems__(self, indices):
        self.calls += 1
        return super().__getitems__(indices)

    def __getitem__(self, index):
        raise AssertionError("image by image")


def test_a_rank_without_samples_gets_an_empty_batch():
    data = InMemory(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    batches = [MicroBatches(data, Order(3, 8, 4))[0, 0, number] for number in range(4)]
    assert [len(batch["label"]) for batch in batches] == [0, 1, 1, 1]
    assert batches[0]["image"].shape == (0, 1, 2, 2)


@given(
    st.integers(2, 300),
    st.integers(1, 20),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from(["keep", "drop"]),
)
def test_micro_batches_made_together_are_those_made_alone(size, micro_batch, share, world_size, tail):
    order = Order(size, micro_batch, share * world_size, seed=3, tail=tail, share=share)
    data = InMemory(torch.arange(size, dtype=torch.uint8).repeat(3, 1).T.reshape(size, 3, 1, 1), torch.arange(size))
    for rank in range(world_size):
        keys, batches = MicroBatchSampler(order, rank, world_size), MicroBatches(data, order)
        for key, batch in zip(keys, MicroBatchLoader(keys, 0, {}, dataset=batches), strict=True):
            alone = batches[key]
            assert batch.keys() == alone.keys()
            assert batch["sample"].tolist() == alone["sample"].tolist() == batch["label"].tolist()
            assert torch.equal(batch["image"], alone["image"])


def test_small_images_are_made_for_many_micro_batches_at_once():
    data, order = Counting(1040, image_size=8), Order(1040, 16, 1, seed=0)
    assert len([*MicroBatchLoader(MicroBatchSampler(order, 0, 1), 0, {}, dataset=MicroBatches(data, order))]) == 65
    assert data.calls == 3  # a first one, to see how large they are, and two of 32


def test_a_set_that_is_small_is_read_whole():
    data = SyntheticImages(700, image_size=8)
    held = whole(data, torch.device("cpu"), at_most=700 * 3 * 8 * 8)
    assert torch.equal(held.images, data.__getitems__(range(700))[0])
    assert torch.equal(held.labels, data.__getitems__(range(700))[1])
    assert whole(data, torch.device("cpu"), at_most=700 * 3 * 8 * 8 - 1) is None
    assert whole(OneByOne("tensor"), torch.device("cpu"), at_most=1 << 30) is None
    assert whole(held, torch.device("cpu"), at_most=0) is held  # it is there already


class Torn(OneByOne):
    def __getitem__(self, index):
        if index in (3, 4):
            raise OSError("truncated")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_can_not_be_read_stops_or_is_skipped_and_listed(workers):
    order = Order(10, 5, 1, None)
    keys, unread = MicroBatchSampler(order, 0, 1), {}
    loader = MicroBatchLoader(keys, 0, unread, dataset=MicroBatches(Torn("tensor"), order, skips=True), num_workers=workers)
    first, _ = loader
    assert first["image"][:, 0, 0, 0].tolist() == [0, 1, 2, 5, 5]
    assert first["sample"].tolist() == [0, 1, 2, 3, 4]
    assert [message.partition(" can't")[0] for message in unread] == [f"Sample {n} of the train set (Torn)" for n in (3, 4)]
    with pytest.raises(ValueError, match=r"Sample 3 of the train set \(Torn\) can't be read"):
        [*MicroBatchLoader(keys, 0, {}, dataset=MicroBatches(Torn("tensor"), order), num_workers=workers)]
