"""Pictures in the dashboard: of our classifier and of somebody's, on one rank and on three; text that a GPT writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from project import Trainer
from project.watch import pictures
from project.watch.dashboard import Dashboard
from project.watch.events import Events
from project.watch.pictures import SIDE, confusion, thumbnails, tiles
from tests.conftest import TINY
from tests.own import write_texts

EXACT = (
    *("--trainer.exact=true", "--trainer.max_steps=8", "--data.source.init_args.train_size=96"),
    *("--data.batch_size=4", "--data.global_batch_size=24"),
)


def shown(run: Path, kind: str = "Images") -> dict[str, list[Any]]:
    """By tag: steps, and what is shown."""
    events = EventAccumulator(str(run), size_guidance={"images": 0, "tensors": 0}).Reload()
    read = getattr(events, kind)
    return {tag: [(event.step, event) for event in read(tag)] for tag in events.Tags()[kind.lower()]}


def test_the_same_pictures_on_one_rank_and_on_three(quick, tmp_path):
    for ranks in (1, 3):
        run = quick("fit", "--config=configs/ddp.yaml", *TINY, *EXACT, f"--run=on{ranks}", ranks=ranks)
        assert run.code == 0, run.output
    on_one, on_three = (shown(tmp_path / f"lightning_logs/on{ranks}") for ranks in (1, 3))
    assert on_one.keys() == {"train/inputs", "val/confusion", "val/mistakes"}
    steps = {tag: [step for step, _ in points] for tag, points in on_one.items()}
    assert steps["train/inputs"] == [1]
    assert steps["val/confusion"] == steps["val/mistakes"] == [4, 8]
    for tag, points in on_one.items():
        pairs = zip(points, on_three[tag], strict=True)
        assert all(picture.encoded_image_string == expected.encoded_image_string for (_, picture), (_, expected) in pairs), tag


class Somebodys(LightningModule):
    """Knows of nothing but Lightning; its batches are pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 5 * 7, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self.network(batch[0])}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def samples(count: int) -> TensorDataset:
    chance = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 3, 5, 7, generator=chance), torch.randint(4, (count,), generator=chance))


@pytest.fixture
def drawn(monkeypatch):
    """Returns what is drawn, by tag, and not as a picture."""
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(pictures, "confusion", lambda counts, names: (counts, names))
    monkeypatch.setattr(pictures, "show", lambda trainer, tag, picture, step: drawn.update({tag: picture}))
    monkeypatch.setattr(pictures, "tiles", lambda images, texts: (images, texts))
    return drawn


def test_of_somebody_elses_module(tmp_path, drawn):
    module, looked_at = Somebodys(), samples(37)
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, accelerator="cpu", devices=1, enable_progress_bar=False)
    trainer.fit(module, DataLoader(samples(24), 8), DataLoader(looked_at, 8))
    images, labels = looked_at.tensors
    with torch.no_grad():
        logits = module.network(images)
    guesses = logits.argmax(1)
    expected = torch.zeros(4, 4, dtype=torch.long)
    for label, guess in zip(labels.tolist(), guesses.tolist(), strict=True):
        expected[label, guess] += 1
    counts, names = drawn["val/confusion"]
    assert torch.equal(counts, expected)
    assert names == ["0", "1", "2", "3"]

    losses = nn.functional.cross_entropy(logits, labels, reduction="none").where(guesses != labels, -1)
    order = losses.argsort(descending=True)[: min(16, int((guesses != labels).sum()))]
    mistakes, texts = drawn["val/mistakes"]
    assert torch.equal(mistakes, thumbnails(images[order]))
    confidence = logits.softmax(1).amax(1)
    assert texts == [[f"label {labels[index]}", f"guess {guesses[index]}, {confidence[index]:.0%}"] for index in order]
    assert len(drawn["train/inputs"][0]) == 8


class Odd(Somebodys):
    """Has several loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self.network(batch[0])
        return {"logits": logits if dataloader_idx < 2 else logits[:, : 2 + batch_idx]}


def test_what_is_no_class_counts_nowhere_and_each_loader_by_itself(tmp_path, drawn):
    images, labels = samples(32).tensors
    ignored = labels.clone()
    ignored[::2], ignored[1] = -100, 99
    module = Odd()
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, accelerator="cpu", devices=1, enable_progress_bar=False)
    loaders = [DataLoader(TensorDataset(images, given), 8) for given in (ignored, torch.eye(4)[labels], labels)]
    trainer.fit(module, DataLoader(samples(24), 8), loaders)
    with torch.no_grad():
        guesses = module.network(images).argmax(1)
    expected = torch.zeros(2, 4, 4, dtype=torch.long)
    for number, (label, guess) in enumerate(zip(labels.tolist(), guesses.tolist(), strict=True)):
        expected[0, label, guess] += int(number % 2 == 1 and number > 1)
        expected[1, label, guess] += 1
    assert torch.equal(drawn["val/confusion/dataloader_idx_0"][0], expected[0])
    assert torch.equal(drawn["val/confusion/dataloader_idx_1"][0], expected[1])
    assert (
        len(drawn["val/confusion/dataloader_idx_2"][0]) == 2
    )  # of the first batch; what is of another size is not of its kind
    wrong = int((guesses != labels)[3::2].sum())
    assert len(drawn.get("val/mistakes/dataloader_idx_0", ((), ()))[1]) == min(wrong, 16)


def test_ranks_with_other_classes_have_no_pictures_and_go_on(quick, tmp_path):
    run = quick(
        *("fit", "--model=tests.watch.plugged.RankClasses", "--data=tests.watch.plugged.Labelled", "--trainer.max_epochs=1"),
        *("--trainer.global_batch_size=12", "--run=it"), ranks=3,
    )  # fmt: skip
    assert run.code == 0, run.output
    assert set(shown(tmp_path / "lightning_logs/it")) == {"train/inputs"}


def test_with_very_many_classes_nothing_is_counted():
    evaluated = pictures.Evaluated()
    evaluated.add(torch.randn(4, 5000), torch.tensor([1, 2, 4999, -1]), torch.rand(4, 3, 8, 8), None)
    assert evaluated.counts is None
    assert len(evaluated.facts) == 4


def test_what_returns_no_logits_has_no_pictures_and_a_gpt_shows_what_it_writes(quick, tmp_path):
    write_texts(tmp_path / "texts")
    words = (
        *("fit", "--config=configs/gpt.yaml", "--trainer.max_steps=6", "--trainer.val_check_interval=2"),
        *("--data.init_args.text=texts/*.txt", "--trainer.global_batch_size=16", "--data.init_args.batch_size=4"),
        *("--model.init_args.width=32", "--trainer.exact=true"),
    )
    for ranks in (1, 2):
        run = quick(*words, f"--run=on{ranks}", ranks=ranks)
        assert run.code == 0, run.output
    assert not shown(tmp_path / "lightning_logs/on1")
    on_one, on_two = (
        [(step, event.tensor_proto.string_val[0]) for step, event in shown(place, "Tensors")["val/sample/text_summary"]]
        for place in (tmp_path / "lightning_logs/on1", tmp_path / "lightning_logs/on2")
    )
    losses = [step for step, _ in shown(tmp_path / "lightning_logs/on1", "Scalars")["val/loss"]]
    assert [step for step, _ in on_one] == [*losses]
    assert len(losses) == 2
    assert on_one == on_two
    assert len(on_one[0][1]) > 200


def test_histograms_and_the_graph_by_a_switch(quick, tmp_path):
    words = ("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_steps=6", "--dashboard.graph=true")
    run = quick(*words, "--dashboard.histograms=2", "--run=it", ranks=2)
    assert run.code == 0, run.output
    accumulator = EventAccumulator(str(tmp_path / "lightning_logs/it"), size_guidance={"histograms": 0}).Reload()
    names = {f"{kind}/network.stem.0.weight" for kind in ("weights", "gradients")}
    assert names <= set(accumulator.Tags()["histograms"])
    for name in names:
        assert [event.step for event in accumulator.Histograms(name)] == [2, 4, 6]
    assert any("Conv2d" in node.name for node in accumulator.Graph().node)
    wrong = quick("fit", "--config=configs/ddp.yaml", *TINY, "--dashboard.histograms=0")
    assert wrong.code
    assert "dashboard.histograms is a number of steps, not 0" in wrong.output


def test_without_tensorboard_the_switches_say_that_they_do_nothing(tmp_path, caplog):
    trainer = Trainer(
        max_steps=1, default_root_dir=tmp_path, accelerator="cpu", devices=1, enable_progress_bar=False, logger=False,
        callbacks=[Dashboard(histograms=1, graph=True)],
    )  # fmt: skip
    trainer.fit(Somebodys(), DataLoader(samples(24), 8))
    messages = [record.getMessage().partition(":")[0] for record in caplog.records if record.levelname == "WARNING"]
    assert {"No histograms", "No graph"} <= set(messages)


def test_a_full_disk_does_not_end_a_run_that_shows_pictures_by_itself(tmp_path, caplog):
    """As any LightningModule does: by `self.logger.experiment`."""
    events = Events(str(tmp_path / "file" / "folder"))
    (tmp_path / "file").write_text("no folder can be here")
    events.experiment.add_text("mine", "words", 1)
    events.experiment.add_image("mine", torch.zeros(3, 4, 4), 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (tmp_path / "file").unlink()
    events.experiment.add_text("mine", "words", 2)
    events.finalize("success")
    assert [step for step, _ in shown(tmp_path / "file/folder", "Tensors")["mine/text_summary"]] == [2]


# Drawing ----------------------------------------------------------------------------------------------------------------


def test_thumbnails_are_seen_whatever_they_were_normalised_to():
    images = torch.tensor([[-3.0, 5.0], [1.0, 1.0]]).expand(2, 1, 2, 2)
    small = thumbnails(images)
    assert small.shape == (2, 3, SIDE, SIDE)
    assert small[0, 0, 0, 0] == 0
    assert small[0, 2, 0, -1] == 255
    assert small[1, 1, -1, -1] == 128
    assert thumbnails(torch.full((1, 4, 200, 90), torch.nan)).max() == 0  # a picture that is none does not end a run


@pytest.mark.parametrize("count", [1, 9])
def test_tiles_stand_in_rows(count):
    picture = tiles(torch.zeros(count, 3, SIDE, SIDE, dtype=torch.uint8), [["a name that is far too long", "x"]] * count)
    assert picture.shape == ((2 * SIDE + 28) * (1 if count == 1 else 2), 2 * SIDE * min(count, 8), 3)


@pytest.mark.parametrize("classes", [2, 10, 70, 400])
def test_what_is_right_is_blue_and_what_is_not_is_red(classes):
    counts = torch.zeros(classes, classes, dtype=torch.long)
    counts[0, 0], counts[1, 0] = 3, 20_000
    picture = confusion(counts, [f"class {number}" for number in range(classes)])
    colours = {tuple(colour) for colour in picture.reshape(-1, 3).tolist()}
    assert {(0, 0, 255), (255, 0, 0)} <= colours
    rows, _ = (picture == (255, 0, 0)).all(2).nonzero()
    below, _ = (picture == (0, 0, 255)).all(2).nonzero()
    assert rows.min() > below.min()
