"""Reads a run's checkpoint on all its hosts, or, where only rank 0's host has it, there."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from project.checkpoints.callback import checkpoints_of
from project.checkpoints.memory import memory_folder
from project.checkpoints.reading import SafeCheckpointIO, newest_good
from project.cluster import shared_folder
from project.errors import FaultError
from project.resume.checkpoint import Resuming
from project.sharded.strategy import Sharded
from project.step.ddp import all_gather_objects
from project.typed import typed

T = TypeVar("T")


class ResumingOnHosts(Resuming):
    """Reads a checkpoint where each rank finds it."""

    def _parse_ckpt_path(
        self, state_fn: TrainerFn, ckpt_path: str | Path | None, model_provided: bool, model_connected: bool
    ) -> str | Path | None:
        """`ckpt_path="last"` is the newest of this run's folder; Lightning looks for those of its ModelCheckpoint."""
        ours = ckpt_path == "last" and checkpoints_of(self.trainer)
        # All ranks look, so nothing is set aside.
        newest = newest_good(Path(self.trainer.default_root_dir) / "checkpoints", set_aside=False) if ours else None
        if newest is not None:
            return str(newest[0])
        return super()._parse_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)

    def read(self, checkpoint_path: str | Path | None, weights_only: bool | None) -> None:
        strategy, io = self.trainer.strategy, self.trainer.strategy.checkpoint_io
        sharded = strategy if isinstance(strategy, Sharded) and strategy.is_sharded else None
        if isinstance(io, SafeCheckpointIO):
            io.slice_of = sharded.slice_of if sharded else None
        self._read_on_hosts(checkpoint_path, weights_only)
        if checkpoint_path and sharded:
            self._loaded_checkpoint = sharded.shards_of(self._loaded_checkpoint)

    def _read_on_hosts(self, checkpoint_path: str | Path | None, weights_only: bool | None) -> None:
        trainer = typed(self.trainer)
        if not checkpoint_path or trainer.num_nodes == 1 or not dist.is_initialized():
            super().read(checkpoint_path, weights_only)
        elif trainer.shared_folder and not trainer.strategy.broadcast(Path(checkpoint_path).parent == memory_folder()):
            gather = partial(all_gather_objects, ranks=trainer.world_size)
            if problem := shared_folder.file_problem(Path(checkpoint_path), trainer.host_names, gather):
                raise FaultError(f"{problem}. HINT: put it where all hosts see it, or set trainer.shared_folder=false.")
            super().read(checkpoint_path, weights_only)
        else:  # through the hosts' memory: the device may have no room for it
            load = trainer.strategy.load_checkpoint
            trainer.strategy.load_checkpoint = partial(_from_rank_0, load)  # type: ignore[method-assign]
            try:
                super().read(checkpoint_path, weights_only)
            finally:
                del trainer.strategy.load_checkpoint


def _from_rank_0(load: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Returns on all ranks what rank 0 reads."""
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    sent = [load(*args, **kwargs) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, 0, group=group)
    dist.destroy_process_group(group)
    return cast(T, sent[0])
