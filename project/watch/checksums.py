"""A number for all the bits of a tensor: another bit somewhere, or two values exchanged, and it is another number.

The bits are seen as 64-bit integers, which lie in rows of 256. Sums over rows and over columns, in which an overflow is no
loss, take most of the work, at the speed of the memory; the few thousand sums are mixed, multiplied each by a number of its
own, and added up. One unit more here and one less there cancel in a row or in a column, and not in both. Integers add up to
the same in any order: the number is the same on a CPU and on a GPU, with any number of threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 256  # words
_PART = 1 << 17  # words that are summed up at once: they stay in a core's cache for the second sum
_SMALL = 1 << 12  # words; what is not larger is not summed up, but multiplied as it is
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHIFT = 29


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_GOLDEN, _FIRST, _SECOND = (_signed(constant) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _factors(places: Tensor) -> Tensor:
    """Returns an odd number for each place, which looks like chance: splitmix64's. Odd ones lose no bit."""
    mixed = (places + 1) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    return (mixed ^ (mixed >> 31)) | 1


def _mixed(sums: Tensor) -> Tensor:
    """Brings the highest bits, of which a multiplication leaves little, to lower places. In the same memory."""
    return sums.bitwise_xor_(sums >> _SHIFT)


def plain(tensor: Tensor) -> bool:
    """Returns whether it is values in memory, and nothing else: not sparse, not spread over ranks, not lazy."""
    if torch.nn.parameter.is_lazy(tensor) or type(tensor.detach()) is not Tensor:
        return False
    return tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized


def _flat(tensor: Tensor) -> Tensor:
    """Returns all values, in the order in which they lie in memory; a copy only where there are gaps between them."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.resolve_neg().permute(order).reshape(-1).contiguous()


def _words(tensor: Tensor) -> Tensor:
    """Returns a tensor's bits as integers: of a large tensor 64-bit ones, if it can be cut into them."""
    flat = _flat(tensor)
    size = flat.element_size()
    if flat.numel() * size > 8 * _SMALL and flat.numel() * size % 8 == 0:
        if flat.storage_offset() * size % 8:
            flat = flat.clone()
        return flat.view(torch.int64)
    return flat.view(_WORDS[size])


class Checksums:
    """The checksums of a fixed list of tensors: a call gives a 64-bit number for each, on their device, without a wait."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = _places(tensors)
        words = [_words(tensor) for tensor in tensors]
        # Where all is a view into the tensors' memory, it need not be made anew at each step.
        self._views = all(flat.data_ptr() == tensor.data_ptr() for flat, tensor in zip(words, tensors, strict=True))
        self._parts: list[Tensor] = []  # of large tensors: rows of words
        few: dict[torch.dtype, list[tuple[int, int, Tensor]]] = {}  # owner, where it begins, words
        sizes: list[tuple[int, int, int]] = []  # in the room: owner, where it begins, how many
        for owner, flat in enumerate(words):
            at = 0
            if len(flat) > _SMALL:
                whole = len(flat) // _ROW * _ROW
                for part in torch.split(flat[:whole], _PART):
                    rows = part.view(-1, _ROW)
                    self._parts.append(rows)
                    sizes.append((owner, at, _ROW + len(rows)))
                    at += _ROW + len(rows)
                flat = flat[whole:]
            if len(flat):
                few.setdefault(flat.dtype, []).append((owner, at, flat))
        self._few = [[words for _, _, words in pieces] for pieces in few.values()]
        sizes += [(owner, at, len(words)) for pieces in few.values() for owner, at, words in pieces]
        self._lay_out(len(tensors), sizes, tensors[0].device if tensors else torch.device("cpu"))

    def _lay_out(self, tensors: int, sizes: list[tuple[int, int, int]], device: torch.device) -> None:
        """Allocates the memory for all that is multiplied: the sums of each part, then the words of small tensors."""
        owners, begins, counts = torch.tensor(sizes, dtype=torch.int64).view(-1, 3).unbind(1)
        total = int(counts.sum())
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)
        places = torch.arange(total) - first + begins.repeat_interleave(counts)
        self._owners = owners.repeat_interleave(counts).to(device, non_blocking=True)
        self._factors = _factors(places).to(device, non_blocking=True)
        self._room = torch.zeros(total, dtype=torch.int64, device=device)
        self._zeros = torch.zeros(tensors, dtype=torch.int64, device=device)
        split = torch.split(
            self._room, [_ROW + len(part) for part in self._parts] + [sum(map(len, pieces)) for pieces in self._few]
        )
        self._sums = [(block[:_ROW], block[_ROW:]) for block in split[: len(self._parts)]]
        self._copies = split[len(self._parts) :]

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether these are the same tensors, at the same addresses."""
        return self._views and _places(tensors) == self._places

    def __call__(self) -> Tensor:
        for rows, (columns, sums) in zip(self._parts, self._sums, strict=True):
            torch.sum(rows, 0, out=columns)
            torch.sum(rows, 1, out=sums)
        for words, copies in zip(self._few, self._copies, strict=True):
            copies.copy_(torch.cat(words))
        return self._zeros.index_add(0, self._owners, _mixed(self._room).mul_(self._factors))


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [*zip(map(Tensor.data_ptr, tensors), map(Tensor.numel, tensors), strict=True)]


def together(checksums: Tensor) -> Tensor:
    """Returns one number for several, which stand in the last dimension. The input is not changed."""
    factors = _factors(torch.arange(checksums.shape[-1], device=checksums.device))
    return (_mixed(checksums.clone()) * factors).sum(-1)


def as_bytes(checksums: Tensor, size: int) -> bytes:
    """Returns the upper `size` bytes of each number, after mixing."""
    mixed = (_mixed(checksums.clone()) * _GOLDEN).cpu()
    return mixed.view(torch.uint8).view(-1, 8)[:, 8 - size :].numpy().tobytes()
