"""Deals samples to the ranks in one order, and holds the data that come along.

`order.py` computes which sample is in which micro-batch on which rank; `dealing.py` gives any DataLoader that order;
`datamodule.py` is `ImageData`, and `sources.py` its CIFAR, folders, digits and your own datasets; `text.py` is bytes for a
language model. A sample's place follows from (seed, epoch, position): the room must not know the network, the loop or the
hosts, and the number of ranks is an argument.
"""

from project.data.datamodule import ImageData
from project.data.order import Order
from project.data.sources import Cifar, Datasets, Digits, ImageFolders, Source, Synthetic
from project.data.synthetic import SyntheticImages

__all__ = [
    "Cifar",
    "Datasets",
    "Digits",
    "ImageData",
    "ImageFolders",
    "Order",
    "Source",
    "Synthetic",
    "SyntheticImages",
]
