"""Finds the parts of a network that are gathered, computed and let go by themselves: its blocks, or those that a YAML names.

A block is what a network repeats: the layers of a transformer, the residual blocks of a stage. What no list repeats is a block
if it is large and is called as a whole (an embedding, the head); the rest belongs to the root, which stays gathered from the
beginning of the forward pass to the end of the backward pass.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
    if named is not None:
        return _untied(network, _named(network, named))
    blocks = dict(_repeated(network))
    least = max([_LARGE, *map(size, blocks.values())])
    within = {id(part) for block in blocks.values() for part in block.modules()}
    for name, module in network.named_modules():
        if id(module) not in within and type(module) in _CALLED and size(module) >= least and _is_called(network, name):
            blocks[name] = module
    return _untied(network, blocks.items())


def size(module: nn.Module) -> int:
    """Returns how many numbers its parameters have."""
    return sum(parameter.numel() for parameter in module.parameters())


def _repeated(network: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields what lists repeat, from outside: a class that is no mere container, and is more than once in its list."""
    children = list(network.named_children())
    counts = Counter(type(child) for _, child in children if _has_parameters(child))
    for name, child in children:
        if isinstance(network, _CONTAINERS) and counts[type(child)] > 1 and _is_block(child):
            yield f"{prefix}{name}", child
        else:
            yield from _repeated(child, f"{prefix}{name}.")


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
        names = (name, type(module).__name__) if name else ()
        matching = {pattern for pattern in patterns if any(fnmatchcase(text, pattern) for text in names)}
        met |= matching
        if matching and id(module) not in taken and _has_parameters(module):
            taken |= {id(part) for part in module.modules()}
            yield name, module
    if missed := [pattern for pattern in patterns if pattern not in met]:
        classes = sorted({type(part).__name__ for part in network.modules() if next(part.children(), None) is not None})
        raise UserError(
            f"blocks={', '.join(missed)}: the network has no such module, by class or by name. HINT: its classes are "
            f"{', '.join(classes[:12])}."
        )


def _untied(network: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> Named:
    """Returns the blocks, each once, in the network's order. What shares a parameter with something outside is the root's."""
    holders = _count_holders(network)
    names = {id(block): name for name, block in reversed([*blocks])}
    return [
        (names[id(block)], block)
        for block in network.modules()
        if id(block) in names and all(holders[key] == count for key, count in _count_holders(block).items())
    ]


def _count_holders(module: nn.Module) -> Counter[int]:
    """Returns how many modules hold each parameter, by its `id`."""
    return Counter(id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False))
