"""The data on which a network trains."""

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
