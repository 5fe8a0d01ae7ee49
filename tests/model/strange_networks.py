"""Networks, optimisers and schedules as users bring them, for tests to plug in by class_path."""

import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn


class Plain(nn.Module):
    """Two layers of a convolution and a head; batch norm, so that there are buffers too."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten())
        self.head = nn.LazyLinear(num_classes)
        self.head(self.body(torch.zeros(2, 3, 8, 8)))

    def forward(self, images):
        return self.head(self.body(images))


class TwoHeads(Plain):
    """Another output in training, as torchvision's Inception has."""

    def forward(self, images):
        logits = super().forward(images)
        return (logits, logits) if self.training else logits


class Map(Plain):
    def forward(self, images):
        return super().forward(images)[:, :, None, None]


class Unused(Plain):
    """A layer that is made and forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(3, 3)


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Nothing(nn.Module):
    def forward(self, images):
        return images.flatten(1)[:, :10]


# Functions, with less and less of a signature


def unannotated(num_classes=10):
    return Plain(num_classes)


def create(name: str, pretrained: bool = False, **kwargs) -> nn.Module:
    """As timm.create_model: what is not its own goes to a class that it finds by name."""
    return globals()[name](**kwargs)


def create_anything(name, **kwargs):
    return globals()[name](**kwargs)


def no_network(num_classes=10):
    return "a network"


class Forwarding(nn.Module):
    """A class that hands on what it does not know."""

    def __init__(self, name="Plain", **kwargs):
        super().__init__()
        self.inner = globals()[name](**kwargs)

    def forward(self, images):
        return self.inner(images)


def halving(optimizer, gamma=0.5):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)


def no_schedule(optimizer):
    return None


def descent(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr)


class Half(ModelPruning):
    """Prunes half of the weights after each epoch."""

    def __init__(self) -> None:
        super().__init__("l1_unstructured", parameter_names=["weight"], amount=0.5)
