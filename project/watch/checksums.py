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
_AT_ONCE = 64  # parts that a GPU gathers: 64 MiB at most
_SMALL = 1 << 12  # words; what is not larger is not summed up, but multiplied as it is
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHIFT = 29


_GOLDEN, _FIRST, _SECOND = (number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


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


def _words(tensor: Tensor) -> Tensor:
    """Returns a tensor's bits as integers, in the order in which they lie in memory: of a large tensor 64-bit ones, if it can
    be cut into them. They are a copy only where there are gaps between the values.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.resolve_neg().permute(order).reshape(-1).contiguous()
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
        device = tensors[0].device if tensors else torch.device("cpu")
        room = _Room()
        self._parts: list[Tensor] = []  # of large tensors: rows of words
        self._gathered: list[tuple[list[Tensor], Tensor]] = []  # parts that a GPU sums up together, and where it brings them
        few: dict[torch.dtype, list[tuple[int, int, Tensor]]] = {}  # owner, where it begins, words
        short: list[tuple[int, int, Tensor]] = []
        for owner, flat in enumerate(words):
            at = 0
            if len(flat) > _SMALL:
                whole = len(flat) // _ROW * _ROW
                full = whole // _PART * _PART if device.type == "cuda" else 0
                if full:
                    self._parts.append(flat[:full].view(-1, _PART // _ROW, _ROW))
                    at = room.add(owner, at, len(self._parts[-1]), _PART // _ROW)
                for part in torch.split(flat[full:whole], _PART) if whole > full else ():
                    if device.type == "cuda":
                        short.append((owner, at, part.view(-1, _ROW)))
                        at += _ROW + len(short[-1][2])
                    else:
                        self._parts.append(part.view(1, -1, _ROW))
                        at = room.add(owner, at, 1, len(part) // _ROW)
                flat = flat[whole:]
            if len(flat):
                few.setdefault(flat.dtype, []).append((owner, at, flat))
        self._gather(short, room, device)
        self._few = [[words for _, _, words in pieces] for pieces in few.values()]
        for pieces in few.values():
            for owner, at, piece in pieces:
                room.add_words(owner, at, len(piece))
        self._owners, self._factors = room.owners_and_factors(device)
        self._room = torch.zeros(len(self._owners), dtype=torch.int64, device=device)
        self._zeros = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        sizes = [many * (_ROW + rows) for many, rows in room.blocks]
        split = torch.split(self._room, sizes + [sum(map(len, pieces)) for pieces in self._few])
        blocks, self._copies = split[: len(sizes)], split[len(sizes) :]
        shaped = [block.view(many, -1) for block, (many, _) in zip(blocks, room.blocks, strict=True)]
        self._sums = [(block[:, :_ROW], block[:, _ROW:]) for block in shaped]

    def _gather(self, short: list[tuple[int, int, Tensor]], room: "_Room", device: torch.device) -> None:
        """Has a GPU sum up short parts together, filled up with zeros: two kernels for each would take most of the time."""
        short = sorted(short, key=lambda part: -len(part[2]))
        batches = [short[at : at + _AT_ONCE] for at in range(0, len(short), _AT_ONCE)]
        most = max((len(batch) * len(batch[0][2]) for batch in batches), default=0)
        memory = torch.empty(most, _ROW, dtype=torch.int64, device=device)  # of all batches, one after the other
        zeros = torch.zeros(_PART // _ROW, _ROW, dtype=torch.int64, device=device)
        for batch in batches:
            rows = len(batch[0][2])
            pieces = [piece for _, _, part in batch for piece in (part, zeros[: rows - len(part)]) if len(piece)]
            self._gathered.append((pieces, memory[: len(batch) * rows]))
            self._parts.append(memory[: len(batch) * rows].view(-1, rows, _ROW))
            room.add_gathered([(owner, at, len(part)) for owner, at, part in batch], rows)

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether these are the same tensors, at the same addresses."""
        return self._views and _places(tensors) == self._places

    def __call__(self) -> Tensor:
        own = len(self._parts) - len(self._gathered)
        for number, (rows, (columns, sums)) in enumerate(zip(self._parts, self._sums, strict=True)):
            if number >= own:
                pieces, memory = self._gathered[number - own]
                torch.cat(pieces, out=memory)
            torch.sum(rows, 1, out=columns)
            torch.sum(rows, 2, out=sums)
        for words, copies in zip(self._few, self._copies, strict=True):
            copies.copy_(torch.cat(words))
        return self._zeros.index_add(0, self._owners, _mixed(self._room).mul_(self._factors))


class _Room:
    """Lays out the memory for all that is multiplied: the sums of each part, then the words of small tensors."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int]] = []  # parts that are summed up together, and the rows of each
        self._pieces: list[tuple[int, int, int, int]] = []  # owner, where it begins in its owner, how many, whether they count

    def add(self, owner: int, at: int, parts: int, rows: int) -> int:
        """Adds the sums of neighbouring parts of a tensor; returns where the next ones begin."""
        self.blocks.append((parts, rows))
        self._pieces.append((owner, at, parts * (_ROW + rows), 1))
        return at + parts * (_ROW + rows)

    def add_gathered(self, parts: list[tuple[int, int, int]], rows: int) -> None:
        self.blocks.append((len(parts), rows))
        for owner, at, own in parts:
            self._pieces += [(owner, at, _ROW + own, 1), (owner, 0, rows - own, 0)]

    def add_words(self, owner: int, at: int, count: int) -> None:
        self._pieces.append((owner, at, count, 1))

    def owners_and_factors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        owners, begins, counts, used = torch.tensor(self._pieces, dtype=torch.int64).view(-1, 4).unbind(1)
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)
        places = torch.arange(int(counts.sum())) - first + begins.repeat_interleave(counts)
        factors = _factors(places) * used.repeat_interleave(counts)
        return owners.repeat_interleave(counts).to(device, non_blocking=True), factors.to(device, non_blocking=True)


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
