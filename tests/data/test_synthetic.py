"""SyntheticImages: a function of (seed, index), learnable as far as it says, no image in two splits."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from project.data.synthetic import SyntheticImages

DATA = SyntheticImages(10**12, image_size=16)


@given(st.lists(st.integers(0, 10**12 - 1), min_size=1, max_size=20))
@settings(max_examples=50)
def test_an_image_does_not_depend_on_its_batch(indices):
    images, labels = DATA.__getitems__(indices)
    for position, index in enumerate(indices):
        image, label = DATA[index]
        assert torch.equal(image, images[position])
        assert label == labels[position]


def test_the_same_images_on_every_platform_and_for_ever():
    images, labels = SyntheticImages(1000, image_size=32, seed=3).__getitems__(range(256))
    assert images.dtype == torch.uint8
    assert images.shape == (256, 3, 32, 32)
    digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    assert digest[:16] == "7798f8a364c0f823"


def test_splits_and_seeds_share_no_image():
    seen: set[bytes] = set()
    for seed in (0, 1):
        for split in ("train", "val", "test"):
            images, _ = SyntheticImages(2000, split, image_size=16, seed=seed).__getitems__(range(2000))
            seen |= {image.numpy().tobytes() for image in images}
    assert len(seen) == 12_000


@pytest.mark.parametrize("difficulty", [0.0, 0.3])
def test_the_best_classifier_is_as_good_as_it_says(difficulty):
    """Nearest class mean, the means learnt without strays: on shifted patterns under noise it makes hardly a mistake."""
    means = torch.zeros(10, 3 * 16 * 16)
    images, labels = SyntheticImages(20_000, image_size=16, difficulty=0.0).__getitems__(range(20_000))
    means.index_add_(0, labels, images.flatten(1).float())
    means /= torch.bincount(labels)[:, None]

    data = SyntheticImages(20_000, "val", image_size=16, difficulty=difficulty)
    images, labels = data.__getitems__(range(20_000))
    guess = torch.cdist(images.flatten(1).float(), means).argmin(1)
    assert (guess == labels).float().mean().item() == pytest.approx(1 - difficulty * (1 - 1 / 10), abs=0.02)


@pytest.mark.parametrize(
    ("settings_", "cause"),
    [({"size": 0}, "between 1 and"), ({"size": 5, "split": "x"}, "split"), ({"size": 5, "difficulty": 2}, "difficulty")],
)
def test_what_makes_no_sense_is_refused(settings_, cause):
    with pytest.raises(ValueError, match=cause):
        SyntheticImages(**settings_)
    with pytest.raises(IndexError):
        SyntheticImages(5)[5]
