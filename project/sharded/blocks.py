"""Finds the parts of a network that are gathered, computed and let go by themselves: its blocks, or those that a YAML names.

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
    """Returns the blocks of a network by their names, none within another, in the order in which the network has them.

    Args:
        network: any module.
        named: classes (TransformerBlock), modules (network.head) or patterns of these (network.layers.*); None finds them.
    """
    blocks = [*(_repeated(network) if named is None else _named(network, named))]
    if named is None:
        largest = max((size(block) for _, block in blocks), default=0)
        within = {id(part) for _, block in blocks for part in block.modules()}
        blocks += [
            (name, module)
            for name, module in network.named_modules()
            if id(module) not in within
            and type(module) in _CALLED
            and size(module) >= max(_LARGE, largest)
            and _is_called(network, name)
        ]
    return _in_order(network, _untied(network, blocks))


def size(module: nn.Module) -> int:
    """Returns how many numbers its parameters have."""
    return sum(parameter.numel() for parameter in module.parameters())


def _repeated(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields what lists repeat, from outside: a class that is no mere container, and is more than once in its list."""
    waiting: list[tuple[str, nn.Module]] = [("", network)]
    while waiting:
        prefix, module = waiting.pop()
        children = [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
        counts = Counter(type(child) for _, child in children if _has_parameters(child))
        for name, child in children:
            if isinstance(module, _CONTAINERS) and counts[type(child)] > 1 and _is_block(child):
                yield name, child
            else:
                waiting.append((name, child))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_block(module: nn.Module) -> bool:
    return _has_parameters(module) and not isinstance(module, _CONTAINERS) and next(module.children(), None) is not None


def _is_called(network: nn.Module, name: str) -> bool:
    """Returns whether a layer is called: an attention of torch takes the weights of its layers, and does not call them."""
    owner = name.rpartition(".")[0]
    return bool(owner) and not isinstance(network.get_submodule(owner), nn.MultiheadAttention)


def _named(network: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost modules that the patterns name; refuses a pattern that names none."""
    taken: set[int] = set()
    met: set[str] = set()
    for name, module in network.named_modules():
        those = {
            pattern
            for pattern in patterns
            if name and (fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern))
        }
        met |= those
        if those and id(module) not in taken and _has_parameters(module):
            taken |= {id(part) for part in module.modules()}
            yield name, module
    if missed := [pattern for pattern in patterns if pattern not in met]:
        classes = sorted({type(part).__name__ for part in network.modules() if next(part.children(), None) is not None})
        raise UserError(
            f"blocks={', '.join(missed)}: the network has no such module, by class or by name. HINT: its classes are "
            f"{', '.join(classes[:12])}."
        )


def _untied(network: nn.Module, blocks: Named) -> Named:
    """Leaves out blocks that share a parameter with something outside: it must be there for both, and the root's are."""
    holders = Counter(id(parameter) for module in network.modules() for parameter in module.parameters(recurse=False))
    kept = []
    for name, block in blocks:
        inside = Counter(id(parameter) for module in block.modules() for parameter in module.parameters(recurse=False))
        if all(holders[key] == count for key, count in inside.items()):
            kept.append((name, block))
    return kept


def _in_order(network: nn.Module, blocks: Named) -> Named:
    places = {id(module): at for at, module in enumerate(network.modules())}
    once = {id(block): (name, block) for name, block in reversed(blocks)}
    return sorted(once.values(), key=lambda named: places[id(named[1])])
