"""MiniResNet: the size that was asked for, any image, no Lightning."""

import pytest
import torch

from project.model import MiniResNet


def test_it_has_the_parameters_of_the_reference():
    assert sum(p.numel() for p in MiniResNet().parameters()) == 2_777_674


@pytest.mark.parametrize(("channels", "size", "classes"), [(3, 32, 10), (1, 8, 2), (4, 33, 100)])
def test_image_size_channels_and_classes_are_free(channels, size, classes):
    network = MiniResNet(classes, channels, widths=(8, 16, 32))
    assert network(torch.zeros(2, channels, size, size)).shape == (2, classes)
