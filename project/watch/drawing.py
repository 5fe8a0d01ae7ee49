"""The pictures for the dashboard: images with a line below each, and the confusion matrix."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

SIDE = 64
"""Pixels of a thumbnail."""
_LINE = 12  # pixels of a line of text
_LETTERS = 18  # in a line below a tile
_ACROSS = 8  # tiles
MOST = 400
"""Classes of a confusion matrix that can be looked at."""
_LARGEST = 800  # pixels of it, about
_LETTER = 7  # pixels
_GRID = (225, 225, 225)

Picture = npt.NDArray[np.uint8]
"""(height, width, 3)."""


def thumbnails(images: Tensor) -> Tensor:
    """Returns bytes (images, 3, SIDE, SIDE), each from its darkest to its brightest value, whatever it was normalised to."""
    images = images.detach().float()
    channels = images.shape[1]
    images = images[:, :3] if channels >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    if images.shape[-2:] != (SIDE, SIDE):
        larger = max(images.shape[-2:]) > SIDE
        images = F.interpolate(images, (SIDE, SIDE), mode="area" if larger else "nearest")
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return ((images - low) / (high - low).clamp_min(1e-12) * 255).round().nan_to_num(0).to(torch.uint8)


def tiles(images: Tensor, texts: Sequence[Sequence[str]]) -> Picture:
    """Draws a grid of thumbnails, each with its lines below it."""
    lines = max(map(len, texts), default=0)
    width, height = 2 * SIDE, 2 * SIDE + lines * _LINE + 4
    across = min(_ACROSS, len(images))
    down = -(-len(images) // across)
    picture = Image.new("RGB", (across * width, down * height), "white")
    pen = ImageDraw.Draw(picture)
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        left, top = number % across * width, number // across * height
        tile = Image.fromarray(image.permute(1, 2, 0).cpu().numpy())
        picture.paste(tile.resize((width - 4, 2 * SIDE - 4), Image.Resampling.NEAREST), (left + 2, top + 2))
        for line, words in enumerate(text):
            pen.text((left + 3, top + 2 * SIDE + line * _LINE), shortened(words), fill="black")
    return np.asarray(picture)


def shortened(words: str, most: int = _LETTERS) -> str:
    return words if len(words) <= most else words[: most - 1] + "~"


def confusion(counts: Tensor, names: Sequence[str]) -> Picture:
    """Draws the guesses for each class in a row, as dark as their share of it, with the numbers where there is room."""
    classes = len(counts)
    cell = max(2, min(36, _LARGEST // classes))
    shares = (counts.double() / counts.sum(1, keepdim=True).clamp_min(1)).numpy()
    light = (255 * (1 - shares)).round().astype(np.uint8)
    full = np.full_like(light, 255)
    # What is right is blue, and what is not is red.
    right = np.eye(classes, dtype=bool)
    colours = np.stack([np.where(right, light, full), light, np.where(right, full, light)], 2)
    cells = np.repeat(np.repeat(colours, cell, 0), cell, 1)
    if cell > 4:
        cells[::cell], cells[:, ::cell] = _GRID, _GRID
    room = 8 + max(len(shortened(name)) for name in names) * _LETTER if cell >= _LINE else 0
    top = room + _LINE + 4
    picture = Image.new("RGB", (max(room + len(cells), 28 * _LETTER), top + len(cells)), "white")
    picture.paste(Image.fromarray(cells), (room, top))
    pen = ImageDraw.Draw(picture)
    pen.text((2, 2), "rows: labels, columns: guesses", fill="black")
    for row in range(classes if room else 0):
        middle = row * cell + cell // 2 - 6
        pen.text((2, top + middle), shortened(names[row]), fill="black")
        beside = Image.new("RGB", (room, _LINE), "white")
        ImageDraw.Draw(beside).text((4, 0), shortened(names[row]), fill="black")
        picture.paste(beside.rotate(90, expand=True), (room + middle, _LINE + 2))
        for column in counts[row].nonzero().flatten().tolist() if cell >= 30 else ():
            colour = "white" if shares[row, column] > 0.5 else "black"
            pen.text((room + column * cell + 3, top + middle), _short(int(counts[row, column])), fill=colour)
    return np.asarray(picture)


def _short(count: int) -> str:
    for unit, letter in ((10**6, "M"), (10**4, "k")):
        if count >= unit:
            return f"{count // (unit if letter == 'M' else 1000)}{letter}"
    return str(count)
