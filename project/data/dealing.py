"""Deals any DataLoader over a map-style dataset in this project's order: the same global batches on any number of ranks. The
sampler is replaced, as Lightning replaces it by a DistributedSampler; all else stays the user's."""

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Integral
from typing import Any, TypeAlias, TypedDict, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, Subset, get_worker_info
from torch.utils.data.sampler import BatchSampler
from typing_extensions import NotRequired, Unpack

from project.data.generators import Generators
from project.data.order import Key, MicroBatchSampler, Order, chance, size_of
from project.data.values import Attributes
from project.data.worker_signals import with_signals
from project.errors import UserError
from project.tensors import apply_to_tensors

log = logging.getLogger(__name__)

States: TypeAlias = tuple[torch.Tensor, object, object]

_END = object()
_PROCESSES = 1 << 45  # no micro-batch has this number
_OF_SEEDED = ("dataset", "collate_fn", "_checks", "_attributes", "_generators")  # attributes of a SeededDataset itself


class LoaderSettings(TypedDict):
    """The arguments of a DataLoader that a dealt one has, too."""

    dataset: Dataset[object]
    batch_size: NotRequired[int | None]
    sampler: NotRequired[Iterable[object]]
    batch_sampler: NotRequired[Iterable[list[int]]]
    num_workers: NotRequired[int]
    collate_fn: NotRequired[Callable[[list[object]], object]]
    pin_memory: NotRequired[bool]
    timeout: NotRequired[float]
    worker_init_fn: NotRequired[Callable[[int], None]]
    multiprocessing_context: NotRequired[object]
    prefetch_factor: NotRequired[int | None]
    persistent_workers: NotRequired[bool]


class DealtLoader(DataLoader[object]):
    """A DataLoader that knows the micro-batches it yields: `taken` has the keys of those already given, oldest first.

    Args:
        keys: the keys of this rank's micro-batches.
        seed: of all that is drawn at random for a micro-batch.
        draws: the dataset or the `collate_fn` may draw random numbers.
        settings: those of a DataLoader.
    """

    def __init__(self, keys: MicroBatchSampler, seed: int, draws: bool = True, **settings: Unpack[LoaderSettings]) -> None:
        # A generator of its own for the seeds of its processes: the others stay where they are.
        super().__init__(generator=torch.Generator(), **settings)
        with_signals(self)
        self.keys, self.seed = keys, seed
        self._draws = draws and not self.num_workers
        self.taken: deque[Key] = deque()
        self.aligned = False
        """Tensors lie where a library takes the same way through them each time."""
        self.together: Order | None = None
        """The order of an evaluation that reads other loaders at the same time."""

    def __iter__(self) -> Any:
        return self._note()

    def _batches(self) -> Iterator[object]:
        self.generator.manual_seed(chance(self.seed, (self.keys.epoch, 0, _PROCESSES)))
        return super().__iter__()

    def _note(self) -> Iterator[object]:
        # With the first batch, and not before: on_train_epoch_start may change what the loader's processes have a copy of.
        batches = self._batches()
        for key in self.keys:
            with chance_kept() if self._draws else nullcontext():  # others in this process draw numbers, too
                batch = next(batches, _END)
            if batch is _END:  # a loader may have been stopped in between
                break
            self.taken.append(key)
            yield apply_to_tensors(batch, _aligned) if self.aligned else batch
        self.keys.start_over()


class SeededLoader(DealtLoader):
    """A loader that seeds the random numbers of its samples. Its `dataset` is the user's; a callback may change it."""

    watched = False
    """The first of its processes reports what its copy of the dataset keeps."""
    reports_draws = False
    """It is reported if random numbers are drawn for its first micro-batch as a whole, and not for a sample."""
    _attributes: Attributes | None = None

    def keep_attributes_of(self, loader: DataLoader[object]) -> None:
        """Keeps what a user's subclass has set on its loader, for whoever asks `trainer.train_dataloader` for it."""
        # Not by setattr, which a DataLoader refuses for some names.
        self.__dict__.update({name: value for name, value in vars(loader).items() if name not in self.__dict__})

    def _batches(self) -> Iterator[object]:
        own = self.dataset
        if self.watched and self.persistent_workers:  # processes that outlive an epoch keep their first copy
            self._attributes = self._attributes or Attributes()
            if names := self._attributes.moved(own):
                self.watched = False
                log.warning(
                    "%s: changed, and the loader's processes keep what it was when they began (persistent_workers). HINT: "
                    "persistent_workers=False.",
                    names,
                )
        collate = self.collate_fn
        seeded = vars(self)["dataset"] = SeededDataset(own, collate, self.watched)  # for the iterator that is made here
        if self.reports_draws:
            self.reports_draws, seeded.notes_draws, self.collate_fn = False, True, partial(seeded.collate, collate)
        try:
            return super()._batches()
        finally:
            vars(self)["dataset"], self.collate_fn = own, collate


def _show_own_dataset(init_fn: Callable[[int], None] | None, number: int) -> None:
    """Initialises a loader's process by the user's function, which may set attributes of the user's dataset."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, SeededDataset):
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if init_fn is not None:
        init_fn(number)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Aligns a tensor like torch's own memory: kernels may treat the first numbers of other memory in another way."""
    return tensor if tensor.is_cuda or tensor.data_ptr() % 64 == 0 else tensor.clone()


class Samples(list[int]):
    """The samples of a micro-batch, and the seed of the dataset's random numbers for them, together or `each`."""

    seed = 0
    each = False


class _MicroBatches:
    """Replaces a loader's batch sampler, or its sampler where the dataset gives whole batches."""

    def __init__(self, sampler: MicroBatchSampler, seed: int, each: bool) -> None:
        self.sampler, self.seed, self.each = sampler, seed, each

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Samples]:
        for key in self.sampler:
            samples = Samples(self.sampler.order.indices(key).tolist())
            if not samples:  # a collate_fn makes no batch of nothing
                raise UserError(
                    "An evaluation has fewer samples than there are ranks, and one of them has none. HINT: more samples, or "
                    "fewer ranks (python -m project validate, on one)."
                )
            samples.seed, samples.each = (self.seed if self.each else chance(self.seed, key)), self.each
            yield samples


class SeededDataset(Dataset[object]):
    """The user's dataset, whose random numbers are a function of the micro-batch, in whatever process it is read. If it is
    `watched`, the first of a loader's processes names what the dataset has changed of itself."""

    notes_draws = False
    _states_of_samples: States | None = None
    """The generators' states when the samples of the first micro-batch had been read."""

    def __init__(self, dataset: Dataset[object], collate_fn: object, watched: bool = False) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn
        self._checks, self._attributes = 3 if watched else 0, Attributes()
        self._generators: Generators | None = None  # of the process that looks

    def __len__(self) -> int:
        return size_of(self.dataset)

    def __getattr__(self, name: str) -> object:
        if name in _OF_SEEDED or name.startswith("__"):  # not there yet, while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: object) -> object:
        if not isinstance(index, Samples):
            return self.dataset[index]
        self._watch()
        seed_generators(index.seed)  # and of what a `collate_fn` draws after that
        return self._seeded_sample(index, index[0])

    def __getitems__(self, samples: Samples) -> Sequence[object]:
        self._watch()
        seed_generators(samples.seed)
        whole: object = self.dataset
        while type(whole) is Subset:  # which reads its samples one by one, where the whole does
            whole = whole.dataset
        read: Callable[[list[int]], Sequence[object]] | None = (
            getattr(self.dataset, "__getitems__", None) if hasattr(whole, "__getitems__") else None
        )
        items = [self._seeded_sample(samples, number) for number in samples] if read is None else []
        if self.notes_draws:
            self.notes_draws, self._states_of_samples = False, generator_states()
        return items if read is None else read(list(samples))

    def collate(self, collate_fn: Callable[[Any], object], samples: object) -> object:
        """Makes a batch by the user's function; of an evaluation, reports what is drawn at random for it."""
        batch = collate_fn(samples)
        before, self._states_of_samples = self._states_of_samples, None
        info = get_worker_info()
        if before is not None and (info is None or not info.id):
            warn_of_draws([f"{name} in collate_fn or __getitems__" for name in drawn_from(before)])
        return batch

    def _watch(self) -> None:
        """Checks before each of the first three micro-batches (a `collate_fn` runs after a dataset) that nothing changed."""
        info = get_worker_info() if self._checks else None
        if info is None or info.id:
            return
        self._checks -= 1
        self._generators = self._generators or Generators(
            [(type(self.dataset).__name__, self.dataset), (getattr(self.collate_fn, "__name__", "collate_fn"), self.collate_fn)]
        )
        if names := self._attributes.moved(self.dataset) or ", ".join(self._generators.moved()):
            self._checks = 0
            log.warning(
                "%s: changed in a loader process, which has a copy of its own: with other processes or ranks, and after a "
                "restart, it is another one. A cache of what is only read does no harm. HINT: draw from torch, random and "
                "numpy.random, whose generators are seeded for each micro-batch.",
                names,
            )

    def _seeded_sample(self, samples: Samples, number: int) -> object:
        if samples.each:
            seed_generators(chance(samples.seed, (0, 0, number)))
        return self.dataset[number]


@contextmanager
def chance_kept() -> Iterator[None]:
    """Restores the random generators' states at the end of the context."""
    restore = restore_generators()
    try:
        yield
    finally:
        restore()


def restore_generators() -> Callable[[], None]:
    """Returns a function that sets the random generators to the states that they have now."""
    begun = torch.cuda.is_initialized()
    device = torch.cuda.get_rng_state() if begun and not torch.cuda.is_current_stream_capturing() else None
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()

    def restore() -> None:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if device is not None:
            torch.cuda.set_rng_state(device)
        elif not begun and torch.cuda.is_initialized():  # as torch has it where it is begun
            torch.cuda.manual_seed(torch.initial_seed())

    return restore


def warn_of_draws(names: list[str]) -> None:
    """Warns of random numbers that an evaluation draws from these generators for a micro-batch."""
    if names:
        log.warning(
            "An evaluation draws random numbers (%s), which follow from the micro-batch: on another number of ranks its "
            "micro-batches, and so its metrics, are others. HINT: trainer.exact=true has the same ones on any number.",
            ", ".join(names),
        )


def drawn_from(before: States) -> list[str]:
    """Returns the names of the generators from which somebody has drawn."""
    now = generator_states()
    same = {"torch": torch.equal(before[0], now[0]), "random": before[1] == now[1], "numpy": before[2] == now[2]}
    return [name for name, stayed in same.items() if not stayed]


def generator_states() -> States:
    """Returns the states of the CPU generators of torch, random and numpy, to compare."""
    numpy = np.random.get_state(legacy=True)
    assert isinstance(numpy, tuple)
    return torch.default_generator.get_state(), random.getstate(), (numpy[1].tobytes(), *numpy[2:])


def seed_generators(seed: int) -> None:
    """Seeds the generators of torch on the host, of Python and of NumPy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def sampling(loader: DataLoader[object]) -> BatchSampler | DataLoader[object]:
    """Returns the object that has the loader's `sampler`, `batch_size` and `drop_last`: torch's batch sampler, or the loader
    itself, without a batch size, where the dataset gives whole batches."""
    return loader if loader.batch_sampler is None else cast(BatchSampler, loader.batch_sampler)


def why_not(loader: object) -> str | None:
    """Returns why a loader can't be dealt out; None if it can."""
    if not isinstance(loader, DataLoader):
        return "it is no DataLoader"
    if _has_methods(type(loader)):
        return "it is of a class of its own"
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return "its dataset can only be read from its beginning"
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        shared = isinstance(batches, BatchSampler)
        alone = "" if shared else ", which is no BatchSampler of torch's: several ranks can't share it"
        return f"it has a batch sampler of its own ({type(batches).__name__}{alone})"
    sampler: object = sampling(loader).sampler
    plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if not plain or hasattr(sampler, "set_epoch"):  # somebody wants to know the epoch
        return f"it has a sampler of its own ({type(sampler).__name__})"
    return None if size_of(sampler) == size_of(loader.dataset) else "its sampler does not take each sample once"


def _has_methods(kind: type) -> bool:
    """Returns whether a class of loaders has a method or a property of its own; what its `__init__` sets is read."""
    own = [
        name
        for base in set(kind.__mro__) - set(DataLoader.__mro__)
        for name in vars(base)
        if hasattr(vars(base)[name], "__get__")
    ]
    return any(name not in ("__init__", "__dict__", "__weakref__") for name in own)


def micro_batch_of(loader: DataLoader[object]) -> int:
    """Returns the samples that one process computes at once; 1 for a dataset that gives whole batches."""
    return batch_size_of(loader) or 1


def batch_size_of(loader: object) -> int | None:
    """Returns the batch_size of a loader's batch sampler, or else the loader's; None where neither has one."""
    sizes = [getattr(part, "batch_size", None) for part in (getattr(loader, "batch_sampler", None), loader)]
    return next((int(size) for size in sizes if isinstance(size, Integral) and size), None)


def deal(loader: DataLoader[object], order: Order, rank: int, world_size: int, seed: int, each: bool = False) -> SeededLoader:
    """Returns the same loader, which gives this rank's micro-batches of an order. `each`: what the dataset draws at random
    follows from the sample, as in an evaluation samples meet in other micro-batches on another number of ranks."""
    keys = MicroBatchSampler(order, rank, world_size)
    batches = _MicroBatches(keys, seed, each)
    whole = sampling(loader).batch_size is None
    settings: dict[str, object] = {"batch_size": None, "sampler": batches} if whole else {"batch_sampler": batches}
    kept = ["dataset", "num_workers", "collate_fn", "pin_memory"]
    if loader.num_workers:
        kept += ["prefetch_factor", "multiprocessing_context", "persistent_workers", "timeout"]
    settings |= {name: getattr(loader, name) for name in kept}
    settings["worker_init_fn"] = partial(_show_own_dataset, loader.worker_init_fn)
    dealt = SeededLoader(keys, seed, **cast(LoaderSettings, settings))
    dealt.keep_attributes_of(loader)
    return dealt
