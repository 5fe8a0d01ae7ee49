"""What each module gives, whatever it is and whatever it returns."""

from collections import UserDict, namedtuple
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from project.watch.fingerprints import ModuleOutputs

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Output:
    logits: Tensor
    parts: dict[str, Tensor]


@dataclass(slots=True)
class Slots:
    hidden: Tensor
    unset: Tensor = field(init=False)


class Unreadable(UserDict[str, Tensor]):
    def values(self):
        raise RuntimeError("not now")


class Many(nn.Module):
    """Returns what the function makes of its input."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, values: Tensor):
        return self.make(values)


def names(outputs: ModuleOutputs) -> list[str]:
    return [name for name, _ in outputs.calls]


def test_each_output_of_any_kind_is_heard_while_it_listens():
    kinds = (
        lambda x: x, lambda x: (x, None, [x, "word"]), lambda x: {"a": x, "b": 3}, lambda x: Pair(x, x),
        lambda x: Output(x, {"part": x}), lambda x: x.long(), lambda x: x > 0, lambda x: x.expand(5, *x.shape),
        Slots,
    )  # fmt: skip
    network = nn.ModuleList([Many(make) for make in kinds])

    def heard(values: Tensor) -> list[tuple[str, int]]:
        outputs = ModuleOutputs(network)
        for part in network:
            part(values)
        outputs.end()
        return [(name, int(value)) for name, value in outputs.calls]

    torch.manual_seed(0)
    values = torch.randn(4, 4, requires_grad=True)
    first, repeated, negated = heard(values), heard(values), heard(values * -1)
    assert [name for name, _ in first] == [f"{at} (Many)" for at in range(len(kinds))]
    assert first == repeated
    assert all(value != another for (_, value), (_, another) in zip(first, negated, strict=True))
    assert not any(part._forward_hooks for part in network)


def test_an_output_that_cannot_be_read_does_no_harm():
    endless: list[Tensor | list] = [torch.zeros(2)]
    endless.append(endless)
    network = nn.ModuleList([Many(lambda x: Unreadable(a=x)), Many(lambda x: endless)])
    outputs = ModuleOutputs(network)
    for part in network:
        part(torch.ones(2))
    outputs.end()
    assert names(outputs) == ["1 (Many)"]


def test_nothing_of_what_was_translated_or_has_no_tensors():
    jitted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    compiled = nn.Sequential(nn.Linear(3, 3))
    compiled.compile(backend="eager")
    network = nn.Sequential(nn.Linear(3, 3), jitted, compiled, Many(lambda x: x), Many(lambda x: "word"))
    outputs = ModuleOutputs(network)
    assert not any(part._forward_hooks for part in compiled.modules()), "they would have it translated once more"
    for part in network[:-1]:
        part(torch.zeros(2, 3))
    network[-1](torch.zeros(2, 3))
    assert names(outputs) == ["0 (Linear)", "3 (Many)"]
    outputs.end()
