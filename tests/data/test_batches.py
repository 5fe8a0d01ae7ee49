"""Micro-batches from any dataset: whole batches where it can, image by image where not."""

import numpy as np
import pytest
import torch
from PIL import Image

from project.data.batches import InMemory, MicroBatches
from project.data.order import Order
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


def test_a_dataset_that_makes_batches_is_asked_once():
    class Counting(SyntheticImages):
        calls = 0

        def __getitems__(self, indices):
            self.calls += 1
            return super().__getitems__(indices)

        def __getitem__(self, index):
            raise AssertionError("image by image")

    data = Counting(100)
    MicroBatches(data, Order(100, 32, 1, seed=0))[0, 0, 0]
    assert data.calls == 1


def test_images_of_different_shapes_are_refused():
    class Ragged(OneByOne):
        def __getitem__(self, index):
            return torch.zeros(3, 4 + index, 4, dtype=torch.uint8), 0

    with pytest.raises(ValueError, match="resize"):
        MicroBatches(Ragged("tensor"), Order(10, 4, 1))[0, 0, 0]


def test_a_rank_without_samples_gets_an_empty_batch():
    data = InMemory(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    batches = [MicroBatches(data, Order(3, 8, 4))[0, 0, number] for number in range(4)]
    assert [len(batch["label"]) for batch in batches] == [0, 1, 1, 1]
    assert batches[0]["image"].shape == (0, 1, 2, 2)
