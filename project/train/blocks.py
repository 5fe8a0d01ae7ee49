"""Which parts of a network are gathered, computed and let go by themselves: its blocks, found in it or named in the YAML.

A block is what a network repeats: the layers of a transformer, the residual blocks of a stage. What no list repeats is a block
if it is large and is called as a whole (an embedding, the head); the rest belongs to the root, which stays gathered from the
beginning of the forward pass to the end of the backward pass.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from project.errors import UserError

Named = list[tuple[str, nn.Module]]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CALLED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that are called, where nobody reaches for their weights instead; other classes may be subclassed for that."""
_LARGE = 1 << 20  # numbers: what a block that stands alone has at least


def blocks_of(network: nn.Module, named: Sequence[str] | None = None) -> Named:
    """The blocks of a network by their names, none within another, in the order in which the network has them.

    Args:
        network: any module.
        named: classes (TransformerBlock), modules (network.head) or patterns of these (network.layers.*); None finds them.
    """
    found = [*(_repeated(network) if named is None else _named(network, named))]
    if named is None:
        largest = max((size(one) for _, one in found), default=0)
        within = {id(one) for _, block in found for one in block.modules()}
        found += [
            (name, one)
            for name, one in network.named_modules()
            if id(one) not in within
            and type(one) in _CALLED
            and size(one) >= max(_LARGE, largest)
            and _stands_alone(network, name)
        ]
    return _in_order(network, _untied(network, found))


def size(module: nn.Module) -> int:
    """The numbers in its parameters."""
    return sum(one.numel() for one in module.parameters())


def _repeated(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What lists repeat, from outside: a class that is no mere container, and is there more than once in its list."""
    waiting: list[tuple[str, nn.Module]] = [("", network)]
    while waiting:
        prefix, module = waiting.pop()
        children = [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
        counts = Counter(type(child) for _, child in children if _holds(child))
        for name, child in children:
            if isinstance(module, _CONTAINERS) and counts[type(child)] > 1 and _is_block(child):
                yield name, child
            else:
                waiting.append((name, child))


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_block(module: nn.Module) -> bool:
    return _holds(module) and not isinstance(module, _CONTAINERS) and next(module.children(), None) is not None


def _stands_alone(network: nn.Module, name: str) -> bool:
    """An attention of torch takes the weights of its layers, and does not call them."""
    owner = name.rpartition(".")[0]
    return bool(owner) and not isinstance(network.get_submodule(owner), nn.MultiheadAttention)


def _named(network: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    taken: set[int] = set()
    met: set[str] = set()
    for name, module in network.named_modules():
        those = {one for one in patterns if name and (fnmatchcase(name, one) or fnmatchcase(type(module).__name__, one))}
        met |= those
        if those and id(module) not in taken and _holds(module):
            taken |= {id(one) for one in module.modules()}
            yield name, module
    if missed := [one for one in patterns if one not in met]:
        classes = sorted({type(one).__name__ for one in network.modules() if next(one.children(), None) is not None})
        raise UserError(
            f"blocks={', '.join(missed)}: the network has no such module, by class or by name. HINT: its classes are "
            f"{', '.join(classes[:12])}."
        )


def _untied(network: nn.Module, found: Named) -> Named:
    """Without those that share a parameter with something outside: it must be there for both, and the root's are."""
    holders = Counter(id(one) for module in network.modules() for one in module.parameters(recurse=False))
    kept = []
    for name, block in found:
        inside = Counter(id(one) for module in block.modules() for one in module.parameters(recurse=False))
        if all(holders[one] == count for one, count in inside.items()):
            kept.append((name, block))
    return kept


def _in_order(network: nn.Module, found: Named) -> Named:
    places = {id(module): at for at, module in enumerate(network.modules())}
    once = {id(block): (name, block) for name, block in reversed(found)}
    return sorted(once.values(), key=lambda one: places[id(one[1])])
