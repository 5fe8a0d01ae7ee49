#!/usr/bin/env python
"""How far from the true sum of a step's gradients are the exact sums, and those that a ring makes in float32?

    .venv/bin/python scripts/measure/exact_error.py [minires|gpt] [steps]

Trains with the exact sums. In each step, the micro-batches' gradients are also added up in float64, which is taken for the
truth, and in float32 as DistributedDataParallel does it on four ranks: each rank its own, and then around a ring. Prints the
distance from the truth, relative to its norm, at some steps: of all parameters together, and of the worst. Beside them what
would come out if a float32 or an int32 on a grid travelled.
"""

import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from project.exact.gradients import ExactGradients
from project.model.gpt import GPT
from project.model.minires import MiniResNet

RANKS, MICRO_BATCHES = 4, 24


def ring(terms: list[Tensor]) -> Tensor:
    """The mean, as ranks get it that have as many terms each: one part after the other, each beginning with another rank."""
    share = len(terms) // RANKS
    own = []
    for rank in range(RANKS):
        total = terms[rank * share].clone()
        for term in terms[rank * share + 1 : (rank + 1) * share]:
            total += term
        own.append((total / len(terms)).flatten())
    parts = [mean.tensor_split(RANKS) for mean in own]
    made = []
    for number in range(RANKS):
        total = parts[number][number].clone()
        for step in range(1, RANKS):
            total += parts[(number + step) % RANKS][number]
        made.append(total)
    return torch.cat(made).view_as(terms[0])


def on_one_grid(terms: list[Tensor], bits: int) -> Tensor:
    """The mean, if so many bits travelled: 24 are a float32, 31 an int32. The grid is the finest that the terms allow."""
    largest = max(float(term.abs().max()) for term in terms)
    step = math.ldexp(1.0, math.frexp(largest)[1] - bits + math.ceil(math.log2(len(terms)))) if largest else 1.0
    total = torch.stack([(term.double() / step).round() for term in terms]).sum(0)
    return (total * step / len(terms)).float()


def minires() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], torch.optim.Optimizer]:
    network = MiniResNet(widths=(16, 32, 64))
    kinds = torch.randn(10, 3, 16, 16)
    data = []
    for _ in range(MICRO_BATCHES * 4):
        labels = torch.randint(10, (16,))
        data.append((kinds[labels] + 1.5 * torch.randn(16, 3, 16, 16), labels))
    return network, data, torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)


def gpt() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], torch.optim.Optimizer]:
    network = GPT(context=64, layers=2, width=64)
    text = torch.tensor([*Path(torch.__file__).read_bytes()])
    data = []
    for _ in range(MICRO_BATCHES * 4):
        windows = torch.stack([text[at : at + 65] for at in torch.randint(len(text) - 65, (4,)).tolist()])
        data.append((windows[:, :-1], windows[:, 1:]))
    return network, data, torch.optim.AdamW(network.parameters(), 2e-3)


def main() -> None:
    name, steps = sys.argv[1] if len(sys.argv) > 1 else "minires", int(sys.argv[2]) if len(sys.argv) > 2 else 60
    torch.manual_seed(0)
    network, data, optimizer = {"minires": minires, "gpt": gpt}[name]()
    seen: dict[str, list[Tensor]] = {key: [] for key, _ in network.named_parameters()}
    for key, parameter in network.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter, key=key: seen[key].append(parameter.grad.clone()))
    gradients = ExactGradients(network, MICRO_BATCHES, 1)
    print(
        f"{name}, {MICRO_BATCHES} micro-batches a step; ring of {RANKS} ranks in float32 | one float32 | one int32 | exact sums"
    )
    for step in range(steps):
        for number in range(MICRO_BATCHES):
            inputs, labels = data[(step * MICRO_BATCHES + number) % len(data)]
            loss = nn.functional.cross_entropy(network(inputs).flatten(0, -2), labels.flatten())
            gradients.begin(last=number == MICRO_BATCHES - 1)
            loss.backward()
            gradients.end()
        gradients.finish()
        truth = {key: torch.stack(terms).double().mean(0) for key, terms in seen.items()}
        made = {"ring": {key: ring(terms) for key, terms in seen.items()}}
        made |= {f"{bits} bits": {key: on_one_grid(terms, bits) for key, terms in seen.items()} for bits in (24, 31)}
        made["exact"] = {key: parameter.grad for key, parameter in network.named_parameters()}
        if step % (steps // 6) == 0 or step == steps - 1:
            line = f"step {step:4}  loss {float(loss.detach()):.3f}"
            for means in made.values():
                off = {key: (means[key].double() - truth[key]).norm() for key in truth}
                whole = torch.stack([*off.values()]).norm() / torch.stack([tensor.norm() for tensor in truth.values()]).norm()
                worst = max(float(off[key] / truth[key].norm()) for key in truth if truth[key].norm() > 0)
                line += f"  |  all {whole:.1e}  worst parameter {worst:.1e}"
            print(line, flush=True)
        optimizer.step()
        for terms in seen.values():
            terms.clear()


if __name__ == "__main__":
    main()
