"""Random generators of users, wherever their code holds them: a run that begins names those that draw and are not saved."""

import importlib
import logging
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from project.data.generators import Generators
from tests.own import Points, Regression
from tests.survive.test_states import fit

RNG = np.random.default_rng(3)

LIBRARY = """
import numpy as np

class Compose:
    def __init__(self, seed):
        self.parts = [{"rng": np.random.RandomState(seed)}]

    def __call__(self, sample):
        return sample + self.parts[0]["rng"].normal()

    def __getstate__(self):
        raise NotImplementedError
"""
AUGMENT: Any = None  # of the library, made by a fixture


class Drawing(Dataset[Any]):
    """Draws from a generator that a part of it has."""

    def __init__(self) -> None:
        self.points, self.generator = Points(24), random.Random(1)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.generator.random()
        return self.points[index]


class Transformed(Points):
    """Reads points by a function, as libraries' datasets do."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        super().__init__(24)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(super().__getitem__(index))


def noisy(samples: Any, generator: np.random.Generator) -> Any:
    generator.random()
    return default_collate(samples)


def closed() -> Callable[[Any], Any]:
    generator = torch.Generator().manual_seed(1)

    def collate(samples: Any) -> Any:
        torch.rand(1, generator=generator)
        return default_collate(samples)

    return collate


def augmented(sample: Any) -> Any:
    AUGMENT(0.0)
    return sample


def from_file(sample: Any) -> Any:
    RNG.random()
    return sample


def plain(sample: Any) -> Any:
    torch.rand(1), random.random(), np.random.rand()
    return sample


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package, with an object of which this file keeps a generator."""
    (folder := tmp_path / "site-packages").mkdir()
    (folder / "augmenting.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "augmenting", module := importlib.import_module("augmenting"))
    monkeypatch.setattr(sys.modules[__name__], "AUGMENT", module.Compose(7))


def subset() -> Any:
    return Subset(ConcatDataset([Points(4), Drawing()]), range(24))


CASES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "subset": (lambda: {"dataset": subset()}, "Drawing.generator"),
    "partial": (
        lambda: {"dataset": Points(24), "collate_fn": partial(noisy, generator=np.random.default_rng(1))},
        "DataLoader.noisy",
    ),
    "closure": (lambda: {"dataset": Points(24), "collate_fn": closed()}, "DataLoader.closed.<locals>.collate"),
    "library": (lambda: {"dataset": Transformed(augmented)}, "Transformed.transform.AUGMENT.parts.0.rng"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("library")
def test_a_generator_that_draws_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    settings, name = CASES[case]
    fit(tmp_path, Regression(), DataLoader(batch_size=4, **settings()))
    lines = [record.getMessage() for record in caplog.records if "changed in the first steps" in record.getMessage()]
    assert [line.partition(":")[0] for line in lines] == [name]
    assert "a generator of its own; draw from torch's, Python's or NumPy's own" in lines[0]


@pytest.mark.usefixtures("library")
def test_in_a_loader_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logging.getLogger("project").addHandler(handler := logging.FileHandler(tmp_path / "log"))
    try:
        fit(tmp_path / "file", Regression(), DataLoader(Transformed(from_file), batch_size=4, num_workers=1))
        fit(tmp_path / "batch", Regression(), DataLoader(Points(24), batch_size=4, num_workers=1, collate_fn=closed()))
        fit(tmp_path / "plain", Regression(), DataLoader(Transformed(plain), batch_size=4, num_workers=1))
    finally:
        logging.getLogger("project").removeHandler(handler)
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "changed in a loader process" in line]
    assert [line.partition(":")[0] for line in lines] == ["Transformed.transform.RNG", "collate.generator"]


class Average:
    """Saves itself by a method, as averages of weights do, under other names than those of its attributes."""

    def __init__(self) -> None:
        self.kept = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"average": self.kept}


class Averaging(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.average = Average()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.kept += 1.5

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.average.state_dict()


def test_an_object_that_saves_itself_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit(tmp_path, Averaging(), DataLoader(Points(24), batch_size=4))
    assert "Averaging.average" not in caplog.text


def test_what_all_share_and_what_nobody_holds_is_left_alone() -> None:
    generators = Generators([("data", Transformed(plain)), ("deep", [{"a": partial(noisy, generator=RNG)}])])
    plain(0)
    assert generators.moved() == {}
    RNG.random()
    assert [*generators.moved()] == ["deep.0.a.keywords.generator"]
