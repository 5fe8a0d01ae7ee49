"""A number for all the bits of a tensor: another bit somewhere, or two values exchanged, and it is another number.

The bits are seen as 64-bit integers, which lie in rows of 256. Sums over rows and over columns, in which an overflow is no
loss, take most of the work, at the speed of the memory; the few thousand sums are mixed, multiplied each by a number of its
own, and added up. One unit more here and one less there cancel in a row or in a column, and not in both. Integers add up to
the same in any order: the number is the same on a CPU and on a GPU, with any number of threads.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

_ROW = 256  # words
_PART = 1 << 17  # words that are summed up at once: they stay in a core's cache for the second sum
_AT_ONCE = 64  # parts that a GPU sums up: 64 MiB at most
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
        parts: list[_Piece] = []
        few: list[_Piece] = []
        for owner, flat in enumerate(words):
            whole, begins = len(flat) // _ROW * _ROW if len(flat) > _SMALL else 0, 0
            for part in torch.split(flat[:whole], _PART) if whole else ():
                parts.append(_Piece(owner, begins, part.view(-1, _ROW)))
                begins += _ROW + len(parts[-1].words)
            few.append(_Piece(owner, begins, flat[whole:]))
        device = tensors[0].device if tensors else torch.device("cpu")
        # On a GPU two kernels for each part took an eighth of a step; on a CPU a part alone stays in a core's cache.
        parts.sort(key=lambda piece: -len(piece.words))
        at_once = _AT_ONCE if device.type == "cuda" else 1
        blocks = [parts[at : at + at_once] for at in range(0, len(parts), at_once)]
        self._blocks = [[piece.words for piece in block] for block in blocks]
        few.sort(key=lambda piece: piece.words.element_size())  # to join several kinds of words takes ten times as long
        self._few = [list(some) for _, some in groupby((piece.words for piece in few), Tensor.element_size)]
        self._no_rows = torch.zeros(_PART // _ROW, _ROW, dtype=torch.int64, device=device)
        self._zeros = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        # The rows that fill a block up have sums of 0, which count nowhere.
        pieces = [(piece, _ROW + len(block[0].words)) for block in blocks for piece in block]
        pieces += [(piece, len(piece.words)) for piece in few]
        places = [torch.arange(piece.begins, piece.begins + size, device=device) for piece, size in pieces]
        owners = [torch.full((size,), piece.owner, device=device) for piece, size in pieces]
        self._factors = _factors(torch.cat([self._zeros[:0], *places]))
        self._owners = torch.cat([self._zeros[:0], *owners])

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether these are the same tensors, at the same addresses."""
        return self._views and _places(tensors) == self._places

    def __call__(self) -> Tensor:
        summed = [self._zeros[:0]]
        for block in self._blocks:
            most = len(block[0])
            filled = [rows for part in block for rows in (part, self._no_rows[: most - len(part)])]
            parts = (torch.cat(filled) if len(block) > 1 else block[0]).view(-1, most, _ROW)
            summed.append(torch.cat([parts.sum(1), parts.sum(2)], 1).flatten())
        summed += [torch.cat(words).long() for words in self._few]
        return self._zeros.index_add(0, self._owners, _mixed(torch.cat(summed)).mul_(self._factors))


class _Piece(NamedTuple):
    """A piece of a tensor: of which one, where its numbers begin among that one's, and its words."""

    owner: int
    begins: int
    words: Tensor


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
