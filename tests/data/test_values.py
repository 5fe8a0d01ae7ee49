"""Digests of what users keep: what is large is looked at in part, or not at all, and never for long."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from project.data.values import Attributes, Digests


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
