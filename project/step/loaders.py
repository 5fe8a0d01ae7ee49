"""Deals out training and evaluation loaders in this project's order wherever they can be."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Literal, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from project.data.dealing import DealtLoader, batch_size_of, deal, micro_batch_of, sampling, why_not
from project.data.order import ENOUGH, Limit, Order, cut_for_all, limited, size_of
from project.data.self_dealing import Dealing, SelfDealing
from project.data.worker_signals import with_signals
from project.errors import UserError, as_user_error
from project.step.batch_norm_layers import normalises_batches
from project.step.batching import accumulates_by_epoch, accumulation, check_elastic
from project.step.chance import Moments, run_seed
from project.step.data_ranks import data_ranks
from project.typed import Stateful, TypedTrainer, typed

log = logging.getLogger(__name__)


class Loaders(_DataConnector):
    """The connector of the data: Lightning's, which hands every loader through `_prepare_dataloader` when a loop begins to use
    it.

    Args:
        trainer: the Trainer.
        global_batch: samples behind one optimiser step, over all ranks, if that is given.
        configured_accumulation: the accumulation in the configuration.
        validation_interval: validate every so many optimiser steps (an int), or such a share of an epoch.
        spare_cores: cores that each rank has for loader processes.
        moments: seed what the iterators of loaders draw that are left as they are.
    """

    def __init__(
        self,
        trainer: TypedTrainer,
        global_batch: int | None,
        configured_accumulation: int | Literal["auto"],
        validation_interval: int | float | None,
        spare_cores: int,
        moments: Moments,
    ) -> None:
        super().__init__(trainer)
        self.global_batch, self.configured_accumulation = global_batch, configured_accumulation
        self._validation_interval, self._spare_cores, self._moments = validation_interval, spare_cores, moments
        self._accumulation = trainer.accumulate_grad_batches  # as it was set last
        self.limits: dict[str, Limit] = {}
        """The user's limits by stage: of training in steps, of evaluation in micro-batches over all ranks."""
        self._forget_loaders()
        self._resumes_within_epoch = False  # the run resumes within an epoch
        self._warned: set[str] = set()
        self._steps_of_trial: int | None = None  # while training is set up: to how many steps Lightning is to cut it
        self.sanity_steps: int | float | None = None
        """Micro-batches over all ranks that the sanity check looks at; None: of each rank, as Lightning counts them."""
        self.max_samples: int | None = None
        """How many samples of a training set are read; None: all of them."""
        self.attached: LightningDataModule | None = None
        """The data module of this verb."""

    def _forget_loaders(self) -> None:
        """Forgets the training loaders of another verb, and where it resumed."""
        self._start = (0, 0)  # epoch, and micro-batches of it that are done, over all ranks
        self._epoch_in_use = -1  # in which training loaders were made
        self.set_sizes: list[int] = []
        """The numbers of samples of the training sets in use, as far as they are known."""
        self._restored_sizes: list[int] = []  # of the training sets that the run had before
        self._micro_batch_before: int | None = None  # of the first training loader, when the checkpoint was made
        self._size_before_and_now = (1, 1)  # it and today's, until what is done is counted in micro-batches of today's
        self._steps_done: int | None = None  # of the epoch in which the run resumes, where micro-batches are not known
        self._steps_before: float | None = None  # of an epoch then
        self.micro_batch: int | None = None
        """The samples in a micro-batch of the first training loader."""
        self._dealt: list[DealtLoader] = []  # for training, in this verb
        self._undealt: list[object] = []  # and those that are left as they are, of this epoch
        self._accumulation_is_set = False

    def attach_datamodule(self, model: LightningModule, datamodule: LightningDataModule | None = None) -> None:
        super().attach_datamodule(model, datamodule)
        self.attached = datamodule

    @property
    def readers_in_process(self) -> list[object]:
        """Returns the objects and functions with which this process itself, and no loader process, reads samples: training
        sets, and what puts them together; of a loader that is left as it is its samplers, too.
        """
        dealt = [loader for loader in self._dealt if not loader.num_workers]
        read: list[object] = [part for loader in dealt for part in (loader.dataset, loader.collate_fn)]
        for loader in self._undealt:
            if not hasattr(loader, "state_dict"):
                parts = vars(loader) if hasattr(loader, "__dict__") else {}
                names = "batch_sampler", "sampler", *(() if parts.get("num_workers") else ("dataset", "collate_fn"))
                read += [loader, *(parts[name] for name in names if name in parts)]
        those = [getattr(part, "__self__", part) for part in read]  # a method's own object
        return [*{id(part): part for part in those if part is not None}.values()]

    # The user's limits ------------------------------------------------------------------------------------------------

    def note_limits(self, *stages: str) -> None:
        """Notes what trainer.limit_*_batches are now. Lightning cuts a run that only tries the code, and the training of one
        that overfits."""
        for stage in stages or ("train", "val", "test", "predict"):
            limit: Limit = getattr(self.trainer, f"limit_{stage}_batches")
            everything = isinstance(limit, float) and limit == 1
            self.limits[stage] = None if everything or self._is_trial(stage) else limit

    def _limit(self, stage: str) -> Limit | None:
        """Returns the user's limit, which is not noted yet where a loader is prepared before any loop is set up."""
        if stage not in self.limits:
            self.note_limits(stage)
        return self.limits[stage]

    def _is_trial(self, stage: str) -> bool:
        trainer = typed(self.trainer)
        return bool(trainer.fast_dev_run or (trainer.overfit_batches and stage == "train"))

    @contextmanager
    def limits_of_loop(self, stage: str) -> Iterator[None]:
        """Shows Lightning the limit that is left to it while it sets up a loop; before and after, the user's is to be read."""
        self.note_limits(stage)
        name = f"limit_{stage}_batches"
        given: Limit = getattr(self.trainer, name)
        if self._is_trial(stage):
            self._steps_of_trial = given if stage == "train" and isinstance(given, int) else None
            self._limit_trial()
        elif given:
            setattr(self.trainer, name, 1.0)  # the loaders are cut; for one that is left as it is, see `_prepare_undealt`
        try:
            yield
        finally:
            self._steps_of_trial = None
            setattr(self.trainer, name, given)

    def _limit_trial(self) -> None:
        """Sets the limit of a run that only tries the code, in micro-batches, which Lightning counts."""
        if self._steps_of_trial is not None:
            self.trainer.limit_train_batches = self._steps_of_trial * self.trainer.accumulate_grad_batches

    def begin_verb(self, spare_cores: int | None = None) -> None:
        """Begins another fit, or another verb, and computes its batching, unless that takes the first training loader."""
        self._forget_loaders()
        self.note_limits()
        trainer, data = typed(self.trainer), self.attached
        if trainer.accumulate_grad_batches != self._accumulation and not accumulates_by_epoch(trainer):
            # An argument that is given late, as Lightning's Trainer takes it.
            if trainer.accumulate_grad_batches < 1:
                raise UserError(f"trainer.accumulate_grad_batches is 1 at least, and not {trainer.accumulate_grad_batches}.")
            self.configured_accumulation = trainer.accumulate_grad_batches
        self._accumulate(1)
        if data is not None and isinstance(data, SelfDealing):
            self._let_data_deal(data, self._spare_cores if spare_cores is None else spare_cores)
        elif trainer.training:
            if trainer.exact and self.global_batch is None:
                raise UserError(
                    "trainer.exact needs trainer.global_batch_size: without it a step has as many micro-batches as ranks. "
                    "HINT: set it, in samples; a multiple of the loader's batch_size."
                )
            if self.configured_accumulation != "auto":
                self._accumulate(self.configured_accumulation)

    def _let_data_deal(self, data: SelfDealing, spare_cores: int) -> None:
        """Tells a data module that deals out its own samples what its loaders depend on, and sets the accumulation."""
        trainer, ranks = typed(self.trainer), data_ranks(self.trainer)
        if trainer.overfit_batches:
            raise UserError(
                "trainer.overfit_batches would replace the order of the samples. HINT: train on fewer images instead, as "
                "configs/debug.yaml does."
            )
        data.deal(Dealing(spare_cores, ranks.shared_by, trainer.exact, self.limits))
        if trainer.training:
            size, global_batch = data.batch_sizes()
            if self.global_batch not in (None, global_batch):
                raise UserError(
                    f"trainer.global_batch_size={self.global_batch} has no effect on data with a global_batch_size of its own "
                    f"({global_batch}). HINT: set data.global_batch_size, and leave out the other."
                )
            where = "data.global_batch_size data.batch_size"
            check_elastic(global_batch, size, ranks.count, where)
            count = accumulation(global_batch, size, ranks.count, self.configured_accumulation, where)
            self._accumulate(count, size * ranks.count * count)
            self._accumulation_is_set = True

    def _accumulate(self, count: int, samples: int | None = None) -> None:
        """Has each rank take so many micro-batches in a step, and sets what follows for Lightning, which counts these.

        `samples`: behind the step, where they can be counted; a callback may accumulate more for an epoch.
        """
        trainer = typed(self.trainer)
        if count > 1 and accumulates_by_epoch(trainer):
            raise UserError(
                f"GradientAccumulationScheduler sets the accumulation by epoch, and the global batch makes it {count}. HINT: "
                "leave out the callback, or have each rank take its share of the global batch as one micro-batch."
            )
        self._accumulation = trainer.accumulate_grad_batches = count
        trainer.global_batch = samples
        if isinstance(self._validation_interval, int):
            trainer.val_check_interval = self._validation_interval * count

    def start_at_step(self, epoch: int, step: int, steps: float | None) -> None:
        """Resumes training after a step of an epoch, where no more is known. `steps`: those of an epoch so far, if known."""
        self._steps_done, self._steps_before = step, steps
        self.start_at(epoch, step, [], within=True, size=None)

    def start_at(self, epoch: int, micro_batches: int, sizes: list[int], within: bool, size: int | None) -> None:
        """Resumes training from here: so many micro-batches of this size are done, over all ranks, of sets of these sizes.
        Loaders may have been made already: a schedule that needs the length of the run has them made, and a sharded network is
        restored after that.
        """
        same = within or not typed(self.trainer).reload_dataloaders_every_n_epochs  # an epoch may have a set of its own
        self._start, self._resumes_within_epoch = (epoch, micro_batches), within
        self._restored_sizes = list(sizes) if same else []
        self._epoch_in_use, self.set_sizes, self._micro_batch_before = -1, [], size
        for loader in self._dealt:
            self._set_start(loader)

    def _set_start(self, loader: DealtLoader) -> DealtLoader:
        """Sets a training loader to where the run resumes."""
        epoch, done = self._start
        order = loader.keys.order
        now = self.trainer.current_epoch
        if self._epoch_in_use != now:
            self._epoch_in_use, self.set_sizes, self.micro_batch = now, [], order.micro_batch
            before, self._micro_batch_before = self._micro_batch_before, None  # a later epoch may have another one
            if before not in (None, order.micro_batch):
                done = self._done_in_current_size(order, before)
            if self._steps_done is not None:
                self._check_steps(order.steps, self._steps_done)
                done = self._steps_done * order.micro_batches
                self._start = epoch, done
        self.set_sizes.append(order.size)
        if self._restored_sizes and now == epoch:
            self._check_set_size(order.size, self._restored_sizes.pop(0))
        loader.keys.start_at(epoch, done // order.micro_batches)
        return loader

    def _check_steps(self, steps: int, done: int) -> None:
        """Raises a UserError where an epoch of Lightning's own Trainer had other steps (one more, where its last is short)."""
        before = self._steps_before
        if done >= steps or (before is not None and abs(before - steps) > 1):
            of = "" if before is None else f" of {before:g}"
            raise UserError(
                f"The checkpoint is of Lightning's own Trainer, after step {done}{of} of an epoch, and an epoch has {steps} "
                "steps here. HINT: trainer.global_batch_size is what a step had there: batch_size x accumulate_grad_batches x "
                "devices; or take a checkpoint of an epoch's end."
            )

    def _done_in_current_size(self, order: Order, before: int) -> int:
        """Returns how many micro-batches of today's size are done in the epoch in which the run resumes."""
        (epoch, done), now = self._start, order.micro_batch
        what = f"The training loader's batch_size is {now}, and was {before} so far"
        if done * before % order.global_batch:
            raise UserError(
                f"{what}: the run was stopped {done * before} samples into an epoch, which is between two steps of "
                f"{order.global_batch}. HINT: batch_size={before}, or a checkpoint of an epoch's end."
            )
        log.warning(
            "%s: the run continues with the next sample. Sums differ in their last bits, batch norm in more. HINT: with "
            "trainer.global_batch_size the batch_size can stay as it is on any number of ranks.",
            what,
        )
        self._start, self._size_before_and_now = (epoch, done * before // now), (before, now)
        return self._start[1]

    def recount_progress(self, batches: Stateful) -> None:
        """Makes Lightning's progress, which is restored by now, count in micro-batches of today's size."""
        (before, now), self._size_before_and_now = self._size_before_and_now, (1, 1)
        if self._steps_done is not None:
            before, self._steps_done = self.trainer.accumulate_grad_batches, None
        counts = batches.state_dict()
        for counters in (counts["current"], counts["total"]):
            counters.update({name: count * before // now for name, count in counters.items()})
        batches.load_state_dict(counts)

    def _check_set_size(self, now: int, before: int) -> None:
        """Warns where a training set has another size than before; refuses it where the run resumes within an epoch."""
        if now == before:
            return
        what = f"The training set has {now} samples, and had {before} so far: their order is another one"
        if self._resumes_within_epoch:
            raise UserError(
                f"{what}, and the run was stopped within an epoch. HINT: continue with the data that it had, or from a "
                "checkpoint of an epoch's end."
            )
        log.warning("%s from here on.", what)

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        """Returns a loader in our order, or Lightning's own where it can't be dealt out. Lightning calls it for each loader."""
        training = mode == RunningStage.TRAINING
        if isinstance(dataloader, list) and not dataloader:  # by which a user says that there is none
            return dataloader
        if isinstance(dataloader, DealtLoader):
            if training:
                self._dealt.append(dataloader)
            return self._set_start(dataloader) if training else dataloader
        why = why_not(dataloader)
        if isinstance(dataloader, DataLoader):
            if why is None and size_of(dataloader.dataset):
                return self._deal_for_training(dataloader) if training else self._deal_for_evaluation(dataloader, mode)
            with_signals(dataloader)
        self._prepare_undealt(dataloader, mode, why)
        try:
            return super()._prepare_dataloader(_with_own_sampler(dataloader), shuffle, mode)
        except (TypeError, MisconfigurationException) as error:
            if "batch sampler" not in str(error):
                raise
            batches = type(dataloader.batch_sampler).__name__ if isinstance(dataloader, DataLoader) else "none"
            raise as_user_error(
                error,
                f"{self.trainer.world_size} ranks can't share the batch sampler {batches}: it is no BatchSampler of "
                "torch's, or can't be made again from its own arguments. HINT: make it one; or, where it gives each rank "
                "batches of its own, set trainer.use_distributed_sampler=false.",
            ) from error

    def check_training(self, loaders: object) -> None:
        """Deals out training loaders as the first step of a fit does, which refuses numbers that don't fit."""
        with self.limits_of_loop("train"):
            for loader in CombinedLoader(loaders, "max_size_cycle").flattened:
                self._prepare_dataloader(loader, True, RunningStage.TRAINING)

    def _set_accumulation(self, size: int | None) -> None:
        """Computes the accumulation once: a micro-batch has the batch size of the first training loader."""
        if self._accumulation_is_set:
            return
        self._accumulation_is_set = True
        trainer = self.trainer
        if size is None:
            if self.global_batch is not None:
                raise UserError(
                    "trainer.global_batch_size needs a training loader with a batch_size. HINT: set "
                    "trainer.accumulate_grad_batches instead."
                )
            return
        keys = "trainer.global_batch_size batch_size"
        ranks = data_ranks(trainer).count
        check_elastic(self.global_batch, size, ranks, keys)
        count = accumulation(self.global_batch, size, ranks, self.configured_accumulation, keys)
        if count > 1 and not trainer.lightning_module.automatic_optimization:
            raise UserError(
                f"{type(trainer.lightning_module).__name__} steps its optimisers by itself, once for each micro-batch; a "
                f"global batch of {self.global_batch} takes {count} of {size} on each of {ranks} rank(s). "
                f"HINT: set the loader's batch_size to {size * count}."
            )
        self._accumulate(count, size * ranks * count)
        module = trainer.lightning_module
        if self.global_batch is None and trainer.is_global_zero and module is not None:
            share = "" if module.automatic_optimization else ", and in batch_size what a rank takes of it"
            _warn_of_no_global_batch(size * ranks * count, share)
        self._limit_trial()

    def _deal_for_training(self, loader: DataLoader[object]) -> DealtLoader:
        """Deals out a training loader in this project's order, from where the run is."""
        trainer, size = self.trainer, micro_batch_of(loader)
        self._set_accumulation(size)
        if self._epoch_in_use != trainer.current_epoch and self.micro_batch not in (None, size):
            log.warning(
                "The training loader's batch_size is %d from epoch %d on, and was %d: a step has as many micro-batches as "
                "before. After a restart it may have others. HINT: trainer.accumulate_grad_batches=%d says how many.",
                *(size, trainer.current_epoch + 1, self.micro_batch, trainer.accumulate_grad_batches),
            )
        here = data_ranks(trainer)
        seed = _seed_of(loader, trainer)
        count = size_of(loader.dataset)
        order = Order(
            count if self.max_samples is None else min(count, self.max_samples),
            size,
            here.count * trainer.accumulate_grad_batches,
            seed if _shuffles(loader) else None,
            "drop" if sampling(loader).drop_last else "keep",
            least=2 if normalises_batches(trainer.lightning_module) and size > 1 else 1,
        )
        if order.size and (not order.steps or order.size < order.micro_batches):
            raise UserError(
                f"{order.size} training sample(s) are too few for a global batch of {order.global_batch}. HINT: set "
                "trainer.global_batch_size, or the loader's batch_size, lower."
            )
        dealt = deal(loader, order.limited(self._limit("train")), here.rank, here.count, seed)
        dealt.aligned = typed(trainer).exact
        dealt.watched = trainer.is_global_zero and not trainer.current_epoch
        self._dealt.append(dealt)
        return self._set_start(dealt)

    def _deal_for_evaluation(self, loader: DataLoader[object], mode: RunningStage) -> DealtLoader:
        """Deals out every sample once, whatever the number of ranks: the ranks' batches are as many, and may differ by one
        sample.
        """
        trainer, size, count = self.trainer, micro_batch_of(loader), size_of(loader.dataset)
        if sampling(loader).drop_last:
            count -= count % size
        exact, here = typed(trainer).exact, data_ranks(trainer)
        stage = str(mode.dataloader_prefix)
        batches = limited(-(-count // size), self._limit(stage), f"limit_{stage}_batches", "micro-batches")
        seed = _seed_of(loader, trainer)
        whole = min(count, batches * size)
        if 0 < whole < here.count <= count and not exact:  # a sample for each rank
            self._warn_of_small_limit(stage, whole, size, here.count)
            whole = here.count
        if self.sanity_steps is not None and mode == RunningStage.SANITY_CHECKING:
            whole = int(min(whole, max(ENOUGH, self.sanity_steps * size)))
        if 0 < whole < here.count and not exact:  # on all ranks, of which some would have samples, and wait for the others
            raise UserError(
                f"An evaluation of {whole} sample(s) has none for some of the {here.count} ranks. HINT: more samples, or fewer "
                "ranks (python -m project validate, on one)."
            )
        size = cut_for_all(whole, size, here.count) if exact else size
        shuffled = seed if _shuffles(loader) else None
        order = Order(whole, size, here.count, shuffled, least=1, cut=exact)
        dealt = deal(loader, order, here.rank, here.count, seed, each=True)
        dealt.together = Order(count, micro_batch_of(loader), here.count, shuffled, share=1, cut=True, taken=batches)
        dealt.aligned, dealt.reports_draws = exact, trainer.is_global_zero and not exact
        if mode == RunningStage.PREDICTING and dealt.batch_sampler is not None:
            inner = cast(BatchSampler, dealt.batch_sampler)  # or ours, which has its methods
            wrapped = _IndexBatchSamplerWrapper(inner)  # where Lightning looks for what was predicted
            _set_samplers(dealt, batch_sampler=wrapped)
        return dealt

    def _warn_of_small_limit(self, stage: str, samples: int, size: int, ranks: int) -> None:
        """Warns once that a limit leaves fewer samples than there are ranks, all of which need one."""
        key = f"limit_{stage}_batches"
        if key not in self._warned and self.trainer.is_global_zero:
            self._warned.add(key)
            log.warning(
                "trainer.%s=%s leaves %d sample(s), and each of %d ranks needs one: %d are read, and on fewer ranks others, "
                "with other metrics. HINT: %s=%d has the same samples on up to %d ranks.",
                *(key, self._limit(stage), samples, ranks, ranks, key, -(-ranks // size), -(-ranks // size) * size),
            )

    def deal_together(self, combined: CombinedLoader, stage: str) -> bool:
        """Deals out again the loaders that an evaluation reads at the same time: on any number of ranks the same micro-batches
        meet, each as large as the user has it. Returns whether that can be.
        """
        loaders = [loader for loader in combined.flattened if isinstance(loader, DealtLoader) and loader.together]
        orders = [loader.together for loader in loaders if loader.together]
        if len(orders) < max(2, len(combined.flattened)):
            return False
        trial, last = copy(combined), list[int]()  # of how Lightning combines what they have
        trial.flattened, trial.limits = [range(1), *[range(2)] * (len(orders) - 1)], None
        batch, _, loader_index = [*trial][-1]
        if loader_index:  # one after the other
            return False
        apply_to_collection(batch, int, last.append)
        trial.flattened, trial.limits = [range(order.batches) for order in orders], [order.taken or 0 for order in orders]
        whole, ranks = len(iter(trial)), data_ranks(self.trainer).count
        if self.sanity_steps is not None:
            whole = int(min(whole, max(ENOUGH, self.sanity_steps)))
        if whole < ranks:
            few = f"The {stage} loaders, which are read at the same time, have {whole} micro-batches for {ranks} ranks"
            hint = f"HINT: a smaller batch_size, or at most {whole} ranks."
            if typed(self.trainer).exact:
                raise UserError(f"{few}, of which each takes one at least. {hint}")
            if f"{stage} together" not in self._warned and self.trainer.is_global_zero:
                self._warned.add(f"{stage} together")
                log.warning("%s: each is dealt out alone, and other samples meet than on fewer ranks. %s", few, hint)
            return False
        for loader, order in zip(loaders, orders, strict=True):
            begins_again = len(last) == len(orders)
            loader.keys.order = replace(order, taken=whole if begins_again else min(whole, order.batches))
        return True

    def _prepare_undealt(self, loader: object, mode: RunningStage, why: str | None) -> None:
        """Prepares for a loader that keeps its own order: sets accumulation and limits, and seeds its iterators. Raises a
        UserError where it can't be taken, and logs once what can't be promised of it.
        """
        self._moments.stop_checking()
        self._moments.begin_epoch(self.trainer.current_epoch)
        trainer, stage = self.trainer, str(mode.dataloader_prefix)
        limit = self._limit(stage)
        if mode == RunningStage.TRAINING:
            if typed(trainer).reload_dataloaders_every_n_epochs:
                self._undealt = []
            self._undealt.append(loader)
            self._set_accumulation(batch_size_of(loader))
            if isinstance(limit, int):
                limit *= trainer.accumulate_grad_batches
        elif isinstance(limit, int):
            limit = -(-limit // data_ranks(trainer).count)
        if limit:
            name = f"limit_{stage}_batches"
            setattr(self.trainer, name, limit)
        if why is not None and typed(trainer).exact and mode != RunningStage.PREDICTING:
            raise UserError(
                f"trainer.exact can't be kept: the {stage} loader ({type(loader).__name__}) gives its samples in its own "
                f"order, another one on another number of ranks: {why}. HINT: a DataLoader over a dataset with indices."
            )
        if why is not None and (together := data_ranks(trainer).shared_by) > 1:
            raise UserError(
                f"strategy=sharded: tensor_parallel={together} needs {together} ranks to see the same micro-batches, and the "
                f"{stage} loader ({type(loader).__name__}) gives its samples in its own order: {why}. HINT: a DataLoader over "
                "a dataset with indices."
            )
        if why is None or stage in self._warned or not trainer.is_global_zero:
            return
        self._warned.add(stage)
        ranks = data_ranks(trainer).count
        read = getattr(loader, "dataset", None) if isinstance(loader, DataLoader) else loader
        repeats = ranks > 1 and (isinstance(read, IterableDataset) or read is loader)
        if repeats:
            log.warning(
                "Each of %d ranks reads all of the %s set (%s), which can only be read from its beginning: an epoch has each "
                "sample %d times, unless the dataset asks for its rank by itself. HINT: leave out the other ranks' samples in "
                "its __iter__ (torch.distributed.get_rank), or bring a dataset with indices.",
                *(ranks, stage, type(read).__name__, ranks),
            )
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        others = "" if repeats else " On another number of ranks they are others."
        again = "" if stateful or stage != "train" else " A run that was stopped within an epoch begins its data anew."
        log.warning(
            "The %s loader (%s) gives its samples in its own order: %s.%s%s", stage, type(loader).__name__, why, others, again
        )


@contextmanager
def attached_for_fit(
    trainer: TypedTrainer, model: LightningModule, data: LightningDataModule | None, spare_cores: int | None = None
) -> Iterator[Loaders]:
    """Attaches module and data to the trainer as a fit does, as far as the data's loaders need it. Nothing is trained."""
    loaders = trainer._data_connector
    assert isinstance(loaders, Loaders)
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True
    try:
        loaders.attach_data(model, datamodule=data)
        loaders.begin_verb(spare_cores)
        yield loaders
    finally:
        trainer.training = False


class _Batches(BatchSampler):
    """A BatchSampler of torch's that Lightning makes again with what each rank takes of its sampler; of torch's own class it
    makes none, and batches of one sample.
    """


class _Samples(Sampler[int]):
    """A sampler of torch's of which ranks take their shares; of torch's own class Lightning has them share the whole set."""

    def __init__(self, sampler: Iterable[int]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return size_of(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


def _with_own_sampler(loader: object) -> object:
    """Returns a loader that is left as it is, with its batch sampler's sampler where Lightning looks for what ranks share, or a
    prediction reads: a DataLoader that is given a batch sampler has the whole set there.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    batches, kept = loader.batch_sampler, copy(loader)
    sampler = getattr(batches, "sampler", None)
    if not isinstance(batches, BatchSampler) or sampler is None:
        return loader
    torchs = isinstance(sampler, (RandomSampler, SequentialSampler))
    if torchs and (getattr(sampler, "replacement", False) or size_of(sampler) != size_of(loader.dataset)):
        sampler = _Samples(sampler)
    if type(batches) is BatchSampler:
        batches = _Batches(sampler, batches.batch_size, batches.drop_last)
    _set_samplers(kept, sampler=sampler, batch_sampler=batches)
    return kept


def _set_samplers(loader: DataLoader[object], **samplers: object) -> None:
    """Sets a loader's samplers, which refuses a plain assignment."""
    for name, sampler in samplers.items():
        object.__setattr__(loader, name, sampler)


def _shuffles(loader: DataLoader[object]) -> bool:
    return hasattr(sampling(loader).sampler, "replacement")  # torch's RandomSampler; `why_not` lets no other pass


def _seed_of(loader: DataLoader[object], trainer: Trainer) -> int:
    """Returns the seed of a loader's generator, of rank 0's where the ranks' differ; else the run's."""
    generator = loader.generator or getattr(sampling(loader).sampler, "generator", None)
    if generator is None:
        return run_seed()
    own = generator.initial_seed() % 2**63
    seed: int = trainer.strategy.broadcast(own)
    if seed != own:
        log.warning("Rank %d's loader has a generator with a seed of its own. Rank 0's is taken.", trainer.global_rank)
    return seed


@cache
def _warn_of_no_global_batch(samples: int, share: str) -> None:
    """Warns once in a process, which may make many Trainers."""
    log.warning(
        "There is no trainer.global_batch_size: a step has what the ranks take at once, %d samples here. On another "
        "number of ranks it is another run, of more or fewer steps. HINT: trainer.global_batch_size=%d%s.",
        *(samples, samples, share),
    )
