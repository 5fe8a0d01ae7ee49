"""Pictures in the dashboard, of whatever classifies images: what it is trained on, its worst mistakes, what it takes for what.

Any LightningModule has them whose validation_step returns a dict with its `logits`, (images, classes), for a batch that is a
dict with `image` and `label`, or a pair of these. Where nothing of the kind is returned, this costs a look at each batch.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn import functional as F

from project.cluster.group import Group
from project.train.loop import joins, leaves
from project.watch.drawing import SIDE, confusion, thumbnails, tiles
from project.watch.events import Events

log = logging.getLogger(__name__)

_MISTAKES, _INPUTS = 16, 16  # images
_COLUMNS = 5  # of what is known of a mistake: loss, label, guess, confidence, sample


def seen(batch: Any) -> tuple[Tensor, Tensor] | None:
    """The images and the labels of a batch."""
    if isinstance(batch, Mapping):
        pair: Sequence[Any] = (batch.get("image"), batch.get("label"))
    else:
        pair = batch if isinstance(batch, (list, tuple)) else ()
    if len(pair) != 2 or not all(isinstance(one, Tensor) for one in pair):
        return None
    images, labels = pair
    fits = images.ndim == 4 and images.shape[1] in (1, 3, 4) and images.is_floating_point() and len(labels) == len(images)
    return (images, labels) if fits and labels.ndim in (1, 2) else None


def show(trainer: Trainer, tag: str, picture: Any, step: int) -> None:
    """To each logger that is TensorBoard's."""
    for logger in trainer.loggers:
        if isinstance(logger, Events):
            logger.write(lambda writer: writer.add_image(tag, picture, step, dataformats="HWC"))


@dataclass
class Worst:
    """The mistakes with the largest losses so far; tensors on the device."""

    facts: Tensor
    images: Tensor

    def with_more(self, facts: Tensor, images: Tensor) -> "Worst":
        facts, images = torch.cat([self.facts, facts]), torch.cat([self.images, images])
        best = facts[:, 0].topk(min(_MISTAKES, len(facts))).indices
        return Worst(facts[best], images[best])


class Pictures(Callback):
    """Draws a grid of what the network is trained on when a run begins, and at each validation the rest."""

    def __init__(self) -> None:
        self._group = Group()
        self._forget()

    def _forget(self) -> None:
        self._counts: Tensor | None = None  # (labels, guesses)
        self._worst: Worst | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._wanted = any(isinstance(one, Events) for one in trainer.loggers)
        if self._wanted and trainer.world_size > 1:
            self._group.make()

    # What it is trained on -------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._wanted and not trainer.global_step and trainer.is_global_zero:
            joins(trainer, FirstBatch(self._names(trainer)))

    @staticmethod
    def _names(trainer: Trainer) -> Sequence[str] | None:
        """Of the classes: of a data module that has `class_names`."""
        return getattr(getattr(trainer, "datamodule", None), "class_names", None)

    # What it gets wrong ----------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if not self._wanted or trainer.sanity_checking or not isinstance(logits, Tensor) or logits.ndim != 2:
            return
        if (found := seen(batch)) is None or len(found[0]) != len(logits) or not len(logits):
            return
        images, labels = found
        labels = labels.argmax(1) if labels.ndim == 2 else labels.long()
        samples = batch.get("sample") if isinstance(batch, Mapping) else None
        self._add(logits.detach().float(), labels, images, samples)

    def _add(self, logits: Tensor, labels: Tensor, images: Tensor, samples: Any) -> None:
        """On the device, and without a wait for it."""
        classes = logits.shape[1]
        confidence, guesses = logits.softmax(1).max(1)
        if self._counts is None:
            self._counts = torch.zeros(classes, classes, dtype=torch.long, device=logits.device)
        ones = torch.ones_like(labels)
        self._counts.view(-1).scatter_add_(0, (labels * classes + guesses).clamp(0, classes * classes - 1), ones)
        losses = F.cross_entropy(logits, labels.clamp(0, classes - 1), reduction="none")
        losses = losses.where(guesses != labels, -1.0)  # what is right is no mistake
        numbers = samples.to(losses) if isinstance(samples, Tensor) else torch.zeros_like(losses)
        facts = torch.stack([losses, labels.to(losses), guesses.to(losses), confidence, numbers], 1)
        few = losses.topk(min(_MISTAKES, len(losses))).indices
        facts, small = facts[few], thumbnails(images[few])
        self._worst = Worst(facts, small) if self._worst is None else self._worst.with_more(facts, small)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counts, worst = self._counts, self._worst
        self._forget()
        if not self._wanted or trainer.sanity_checking:
            return
        gathered = self._gathered(counts, worst, trainer.world_size)
        if gathered is None or not trainer.is_global_zero:
            return
        counts, worst = gathered
        names = self._names(trainer) or [str(number) for number in range(len(counts))]
        if len(names) == len(counts) and (picture := confusion(counts, names)) is not None:
            show(trainer, "val/confusion", picture, trainer.global_step)
        mistakes = [row for row in worst.facts.tolist() if row[0] > 0]
        if mistakes:
            texts = [_described(row, names) for row in mistakes]
            show(trainer, "val/mistakes", tiles(worst.images[: len(mistakes)], texts), trainer.global_step)

    def _gathered(self, counts: Tensor | None, worst: Worst | None, ranks: int) -> tuple[Tensor, Worst] | None:
        """Of all ranks, on the host; some of which may have had no sample."""
        if (group := self._group()) is not None:
            sizes = torch.tensor(0 if counts is None else len(counts))
            dist.all_reduce(sizes, dist.ReduceOp.MAX, group=group)
            if not (classes := int(sizes)):
                return None
            counts = torch.zeros(classes, classes, dtype=torch.long) if counts is None else counts.cpu()
            dist.all_reduce(counts, group=group)
            return counts, self._worst_of_all(worst, ranks, group)
        if counts is None or worst is None:
            return None
        return counts.cpu(), _in_order(Worst(worst.facts.cpu(), worst.images.cpu()))

    @staticmethod
    def _worst_of_all(worst: Worst | None, ranks: int, group: Any) -> Worst:
        """First the losses, and then the images of those that are among the worst: each rank adds its own."""
        mine = torch.full((_MISTAKES, _COLUMNS), -1.0)
        if worst is not None:
            mine[: len(worst.facts)] = worst.facts.cpu()
        rows = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(rows, mine, group=group)
        facts = torch.cat(rows)
        places = _order(facts)[:_MISTAKES]
        images = torch.zeros(len(places), 3, SIDE, SIDE, dtype=torch.uint8)
        first = dist.get_rank(group) * _MISTAKES
        for at, place in enumerate(places):
            if worst is not None and 0 <= place - first < len(worst.images):
                images[at] = worst.images[place - first].cpu()
        dist.all_reduce(images, group=group)
        return Worst(facts[places], images)


def _order(facts: Tensor) -> list[int]:
    """The worst first; of several that are as bad, by the sample: the same on any number of ranks."""
    rows = facts.tolist()
    return sorted(range(len(rows)), key=lambda one: (-rows[one][0], rows[one][4], rows[one][1:4]))


def _in_order(worst: Worst) -> Worst:
    places = _order(worst.facts)
    return Worst(worst.facts[places], worst.images[places])


def _described(fact: Sequence[float], names: Sequence[str]) -> list[str]:
    _, label, guess, confidence, _ = fact
    return [f"label {names[int(label)]}", f"guess {names[int(guess)]}, {confidence:.0%}"]


class FirstBatch(Callback):
    """Shows the first micro-batch, with what was done to it; is among the callbacks until then."""

    def __init__(self, names: Sequence[str] | None) -> None:
        self._names = names

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        leaves(trainer, self)
        if (found := seen(batch)) is None:
            return
        images, labels = (one[:_INPUTS] for one in found)
        labels = labels.argmax(1) if labels.ndim == 2 else labels
        texts = [[self._names[one] if self._names and one < len(self._names) else str(one)] for one in labels.long().tolist()]
        show(trainer, "train/inputs", tiles(thumbnails(images), texts), 1)
