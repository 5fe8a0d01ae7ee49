"""Augmentation: a function of (seed, epoch, sample), not of the batch it came in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from project.data import augment
from project.data.augment import Normalise
from tests.operators import Operators

IMAGES = torch.randint(1, 256, (32, 3, 9, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SAMPLES = torch.arange(1000, 1032)


def crop_and_flip(images, samples, epoch, seed, padding, flip):
    moves = augment.drawn_moves(samples, epoch, seed, padding, flip, images.shape[-1])
    return augment.crop_and_flip(images, moves, padding)


def test_flipped_alternately_two_epochs_in_a_row_show_both():
    shown = [crop_and_flip(IMAGES, SAMPLES, epoch, seed=1, padding=0, flip="alternate") for epoch in range(4)]
    assert torch.equal(shown[0], shown[2])
    assert torch.equal(shown[1], shown[0].flip(3))
    mirrored = sum(torch.equal(crop, image.flip(2)) for crop, image in zip(shown[0], IMAGES, strict=True))
    assert 8 < mirrored < 24  # of 32


def test_a_device_has_little_work_with_it():
    """It was 45 operators, 37 of which a GPU would be sent one by one."""
    moves = augment.drawn_moves(SAMPLES, 0, 1, 2, True, 7)
    with Operators() as operators:
        augment.crop_and_flip(IMAGES, moves, 2)
    assert operators.launches <= 7


@given(st.permutations(range(32)), st.integers(1, 32), st.integers(0, 50))
@settings(max_examples=30)
def test_the_batch_does_not_matter(order, cut, epoch):
    whole = crop_and_flip(IMAGES, SAMPLES, epoch, seed=1, padding=2, flip=True)
    chosen = torch.tensor(order[:cut])
    part = crop_and_flip(IMAGES[chosen], SAMPLES[chosen], epoch, seed=1, padding=2, flip=True)
    assert torch.equal(part, whole[chosen])
    assert not torch.equal(whole, crop_and_flip(IMAGES, SAMPLES, epoch + 1, seed=1, padding=2, flip=True))


def test_every_move_and_its_mirror_image_occur():
    image = IMAGES[:1].expand(4000, -1, -1, -1)
    out = crop_and_flip(image, torch.arange(4000), 0, seed=1, padding=1, flip=True)
    padded = torch.nn.functional.pad(IMAGES[0], (1,) * 4)
    wanted = {}
    for down in range(3):
        for right in range(3):
            moved = padded[:, down : down + 9, right : right + 7]
            wanted[moved.numpy().tobytes()] = 0
            wanted[moved.flip(2).contiguous().numpy().tobytes()] = 0
    for crop in out:
        wanted[crop.contiguous().numpy().tobytes()] += 1  # a KeyError is an image that no move explains
    assert min(wanted.values()) > 4000 / 18 / 2


def test_without_padding_and_flip_nothing_moves():
    assert torch.equal(crop_and_flip(IMAGES, SAMPLES, 0, 1, 0, False), IMAGES)


@pytest.mark.parametrize(("mean", "std"), [(0.5, 0.25), ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)), (0.5, (0.2, 0.3, 0.25))])
def test_normalise_bytes_and_floats_alike(mean, std):
    normalise = Normalise(mean, std, torch.device("cpu"))
    means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    floats, before = IMAGES.float() / 255, IMAGES.clone()
    torch.testing.assert_close(normalise(IMAGES), (floats - means) / stds)
    torch.testing.assert_close(normalise(floats), (floats - means) / stds)
    assert torch.equal(IMAGES, before)
    assert torch.equal(floats, before.float() / 255)
