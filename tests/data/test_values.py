"""Digests of what users keep: what is large is looked at in part, or not at all, and never for long."""

from collections.abc import Iterator
from functools import lru_cache
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from project.data.values import Attributes, Digests, attributes_of
from project.resume.attributes import _values


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """A look at a value is an item."""
    look, count = Digests._digest, list[None]()

    def counted(self: Digests, value: Any, deep: int) -> bytes | None:
        count.append(None)
        return look(self, value, deep)

    monkeypatch.setattr(Digests, "_digest", counted)
    return count  # type: ignore[return-value]


def test_what_is_saved_is_found_without_a_look_at_each_number(looks: list[None]) -> None:
    history = [float(number) for number in range(100_000)]
    state = {"history": history, "table": {str(number): [number, number] for number in range(100_000)}, "last": (7, [8.0])}
    digests = Digests()
    saved = digests.within({"mine": state})
    assert saved is not None
    assert {digests.of(value) for value in (history, 7, [8.0])} <= saved
    assert len(looks) < 5_000


def test_what_is_more_than_can_be_looked_at_is_unknown(looks: list[None]) -> None:
    digests, large = Digests(), torch.zeros(4 << 20)
    assert digests.within({"banks": [large] * 40}) is None
    assert {digests.of(large) for _ in range(40)} >= {None}
    assert len(looks) < 1_000


def test_a_set_or_a_dict_that_grows_is_another_one() -> None:
    digests, numbers = Digests(), range(1000)
    assert digests.of({*numbers}) != digests.of({*numbers, 1000})
    assert digests.of(dict.fromkeys(numbers)) != digests.of(dict.fromkeys([*numbers, 1000]))
    assert digests.of({"a": 1}) != digests.of({"a": 2})


class Live(dict[str, int]):
    """A dict that another thread changes while it is read."""

    def items(self) -> Any:
        for item in super().items():
            self[f"{len(self)}"] = 0
            yield item


class Unfit(torch.nn.Module):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not fitted yet")


@pytest.mark.parametrize("value", [Live(a=1), [Unfit()]])
def test_what_cannot_be_read_at_this_moment_is_unknown(value: object) -> None:
    assert Digests().of(value) is None


class Foreign:
    """A function of a library that says to be one of Python's, and lacks a name that those have."""

    __name__ = "read"
    __class__ = property(lambda self: BuiltinFunctionType)  # type: ignore[assignment]


@pytest.mark.parametrize("value", [np.timedelta64(1, "h"), np.datetime64("2026-01-01"), np.timedelta64("NaT"), Foreign()])
def test_a_counter_is_seen_beside_any_value(value: object) -> None:
    digests = [Digests().of({"seen": seen, "other": value}) for seen in (1, 1, 2)]
    assert digests[0] is not None
    assert digests[0] == digests[1] != digests[2]
    assert Digests().of(np.timedelta64(1, "h")) != Digests().of(np.timedelta64(2, "h"))


class Loader(DataLoader[Any]):
    pass


def test_what_lightning_keeps_in_a_loader_is_not_looked_at() -> None:
    loader = Loader([1, 2])
    vars(loader)["__pl_saved_args"] = ([1],)
    assert "dataset" in _values(loader)
    assert not any(name.startswith("__pl_") for name in {**_values(loader), **(attributes_of(loader) or {})})


class Remembering:
    @lru_cache  # noqa: B019
    def drawn(self, index: int) -> float:
        return float(torch.rand(()))

    @lru_cache  # noqa: B019
    def doubled(self, index: int) -> int:
        return 2 * index


def test_a_function_that_draws_and_keeps_what_it_gave_is_another_one() -> None:
    thing, attributes = Remembering(), Attributes()
    assert attributes.moved(thing) == ""
    thing.doubled(1)  # what does not draw gives the same again
    assert attributes.moved(thing) == ""
    thing.drawn(1)
    assert attributes.moved(thing) == "Remembering.drawn"
