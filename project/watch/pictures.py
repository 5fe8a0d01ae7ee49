"""The pictures in the dashboard, of any classifier of images: its training images, its worst mistakes, its confusion matrix.

Any LightningModule has them whose validation_step returns a dict with its `logits`, (images, classes), for a batch that is a
dict with `image` and `label`, or a pair of these. Where nothing of the kind is returned, this costs a look at each batch.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

from project.cluster.group import Group
from project.step.data_ranks import data_ranks
from project.step.ddp import all_gather_objects
from project.step.epoch_loop import add_callback, remove_callback
from project.typed import typed
from project.watch.events import boards

log = logging.getLogger(__name__)

_MISTAKES, _INPUTS = 16, 16  # images
_COLUMNS = 5  # of what is known of a mistake: loss, label, guess, confidence, sample
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


def seen(batch: object) -> tuple[Tensor, Tensor] | None:
    """Returns the images and the labels of a batch."""
    if isinstance(batch, Mapping):
        pair: Sequence[object] = (batch.get("image"), batch.get("label"))
    else:
        pair = batch if isinstance(batch, (list, tuple)) else ()
    if len(pair) != 2:
        return None
    images, labels = pair
    if not isinstance(images, Tensor) or not isinstance(labels, Tensor):
        return None
    plain = images.layout == labels.layout == torch.strided
    fits = images.ndim == 4 and images.shape[1] in (1, 3, 4) and images.is_floating_point() and len(labels) == len(images)
    numbers = labels.ndim == 1 and not labels.is_floating_point() and not labels.is_complex()
    shares = labels.ndim == 2 and labels.is_floating_point() and labels.shape[1] > 1
    return (images, labels.long() if numbers else labels) if plain and fits and (numbers or shares) else None


def show(trainer: Trainer, tag: str, picture: Picture, step: int) -> None:
    """Adds a picture to each logger that is TensorBoard's."""
    for board in boards(trainer):
        board.experiment.add_image(tag, picture, step, dataformats="HWC")


class Evaluated:
    """The results of one loader's batches so far, on the device, and without a wait for it."""

    def __init__(self) -> None:
        self.classes = 0
        self.counts: Tensor | None = None  # (labels, guesses)
        self.facts = torch.empty(0, _COLUMNS)  # of the mistakes with the largest losses
        self.images = torch.empty(0, 3, SIDE, SIDE, dtype=torch.uint8)

    def add(self, logits: Tensor, labels: Tensor, images: Tensor, samples: object) -> None:
        """Adds a batch. A label that is no class (-100, say) counts nowhere."""
        classes = logits.shape[1]
        if self.classes not in (0, classes):
            return  # of another task
        self.classes = classes
        if labels.ndim == 2:  # shares of the classes
            fits, labels = (labels.sum(1) - 1).abs() < 1e-3, labels.argmax(1)
        else:
            fits = (labels >= 0) & (labels < classes)
        labels = labels.clamp(0, classes - 1)
        confidence, guesses = logits.softmax(1).max(1)
        if classes <= MOST:
            if self.counts is None:
                self.counts = torch.zeros(classes, classes, dtype=torch.long, device=logits.device)
            self.counts.view(-1).scatter_add_(0, labels * classes + guesses, fits.long())
        losses = F.cross_entropy(logits, labels, reduction="none")
        losses = losses.where(fits & (guesses != labels), -1.0).nan_to_num(-1.0)  # what is right is no mistake
        numbers = (
            samples.to(losses) if isinstance(samples, Tensor) and samples.shape == losses.shape else torch.zeros_like(losses)
        )
        facts = torch.stack([losses, labels.to(losses), guesses.to(losses), confidence, numbers], 1)
        few = losses.topk(min(_MISTAKES, len(losses))).indices
        facts = torch.cat([self.facts.to(facts), facts[few]])
        worst = facts[:, 0].topk(min(_MISTAKES, len(facts))).indices
        self.facts, self.images = facts[worst], torch.cat([self.images.to(images.device), thumbnails(images[few])])[worst]

    def join(self, ranks: int, group: dist.ProcessGroup | None) -> bool:
        """Joins the results of all ranks on the first one, on the host. Returns False where there is nothing to show, or the
        ranks' classes are not the same.
        """
        known = {*all_gather_objects(self.classes, ranks, group)} - {0}
        if len(known) != 1:
            return False
        (self.classes,) = known
        if self.classes <= MOST:
            self.counts = (
                torch.zeros(self.classes, self.classes, dtype=torch.long) if self.counts is None else self.counts.cpu()
            )
            if ranks > 1:
                dist.all_reduce(self.counts, group=group)
        parts: list[Any] = [(self.facts.cpu(), self.images.cpu())]
        if ranks > 1:
            first = dist.get_rank(group) == 0
            parts, (own,) = [None] * ranks, parts
            dist.gather_object(own, parts if first else None, group=group, group_dst=0)
            if not first:
                return True
        self.facts, self.images = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        rows = self.facts.tolist()
        # The worst first; of several that are as bad, by the sample: the same on any number of ranks.
        order = sorted(range(len(rows)), key=lambda at: (-rows[at][0], rows[at][4], rows[at][1:4]))[:_MISTAKES]
        self.facts, self.images = self.facts[order], self.images[order]
        return True


class Pictures(Callback):
    """Draws a grid of what the network is trained on when a run begins, and at each validation the rest."""

    def __init__(self) -> None:
        self._group = Group()
        self._seen: dict[int, Evaluated] = {}  # by loader
        self._wanted = self._failed = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._wanted = bool(boards(trainer))
        if self._wanted and trainer.world_size > 1 and dist.get_backend() != "gloo":
            ranks = data_ranks(trainer)
            # On the host, as `Throughput` does.
            self._group.make(members=ranks.replica_groups() if ranks.shared_by > 1 else None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._wanted and not trainer.global_step and trainer.is_global_zero:
            add_callback(trainer, FirstBatch(_show_inputs))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen.clear()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if not self._wanted or trainer.sanity_checking or not isinstance(logits, Tensor) or logits.ndim != 2:
            return
        if (pair := seen(batch)) is None or len(pair[0]) != len(logits) or not logits.numel():
            return
        images, labels = pair
        if labels.ndim == 2 and labels.shape != logits.shape:
            return
        samples = batch.get("sample") if isinstance(batch, Mapping) else None
        try:
            self._seen.setdefault(dataloader_idx, Evaluated()).add(logits.detach().float(), labels.detach(), images, samples)
        except Exception as error:  # tensors of a kind that nobody has thought of are no reason to end a run
            self._seen.pop(dataloader_idx, None)
            if not self._failed:
                log.warning("There will be no pictures of the validation: %s: %s", type(error).__name__, error)
            self._failed = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._wanted or trainer.sanity_checking:
            return
        for loader in range(len(trainer.num_val_batches)):
            evaluated = self._seen.pop(loader, None) or Evaluated()
            ranks = data_ranks(trainer)
            if evaluated.join(ranks.count, self._group() or ranks.group) and trainer.is_global_zero:
                _show_results(trainer, evaluated, f"/dataloader_idx_{loader}" if len(trainer.num_val_batches) > 1 else "")


def _show_results(trainer: Trainer, evaluated: Evaluated, suffix: str) -> None:
    names = _names(trainer)
    names = names if names and len(names) == evaluated.classes else [str(number) for number in range(evaluated.classes)]
    if evaluated.counts is not None:
        show(trainer, f"val/confusion{suffix}", confusion(evaluated.counts, names), trainer.global_step)
    texts = [
        [f"label {names[int(label)]}", f"guess {names[int(guess)]}, {confidence:.0%}"]
        for loss, label, guess, confidence, _ in evaluated.facts.tolist()
        if loss > 0
    ]
    if texts:
        show(trainer, f"val/mistakes{suffix}", tiles(evaluated.images[: len(texts)], texts), trainer.global_step)


@runtime_checkable
class NamesClasses(Protocol):
    """Data that have names for their classes."""

    class_names: object


def _names(trainer: Trainer) -> Sequence[str] | None:
    """Returns the names of the classes, of a data module that has a list of `class_names`."""
    try:
        data = typed(trainer).datamodule
        names = data.class_names if isinstance(data, NamesClasses) else None
    except Exception as error:  # a property of somebody's
        log.debug("The names of the classes can't be told: %s", error)
        return None
    return [str(name) for name in names] if isinstance(names, (list, tuple)) else None


class FirstBatch(Callback):
    """Shows the first micro-batch as it is trained on by a function, and then removes itself from the callbacks."""

    def __init__(self, show: Callable[[Trainer, LightningModule, object], None]) -> None:
        self._show = show

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        remove_callback(trainer, self)
        self._show(trainer, pl_module, batch)


def _show_inputs(trainer: Trainer, module: LightningModule, batch: object) -> None:
    if (pair := seen(batch)) is None or not len(pair[0]):
        return
    images, labels = (tensor[:_INPUTS] for tensor in pair)
    names = _names(trainer) or ()
    numbers = (labels.argmax(1) if labels.ndim == 2 else labels).tolist()
    texts = [[names[number] if 0 <= number < len(names) else str(number)] for number in numbers]
    show(trainer, "train/inputs", tiles(thumbnails(images), texts), 1)


# The drawing ---------------------------------------------------------------------------------------------------------


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


def shortened(words: str) -> str:
    return words if len(words) <= _LETTERS else words[: _LETTERS - 1] + "~"


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
    if count >= 10**6:
        return f"{count // 10**6}M"
    return f"{count // 1000}k" if count >= 10**4 else str(count)
