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


def test_stages_halve_the_image_and_project_where_the_shape_changes():
    network = MiniResNet()
    shapes, x = [], network.stem(torch.zeros(1, 3, 32, 32))
    for stage in network.stages:
        x = stage(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(64, 32, 32), (128, 16, 16), (256, 8, 8)]
    assert [[len(block.shortcut) for block in stage] for stage in network.stages] == [[0, 0], [2, 0], [2, 0]]
