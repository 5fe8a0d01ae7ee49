"""Sends gradients in 16 bits: half the bytes, where the network is what a step waits for."""

from collections.abc import Callable
from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from project.errors import UserError

Compression = Literal["none", "fp16", "bf16"]
_HOOKS: dict[str, Callable[..., object]] = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


def supported_compression(
    compression: Compression, configured_precision: str, used_precision: str
) -> tuple[Compression, str | None]:
    """Returns the compression to use: bf16 instead of fp16, and a line for the log, where the precision was to be 16-mixed or
    auto and another is used. Raises a UserError where another was configured.

    Without the loss scaling of fp16, whatever is smaller than 6e-8 in a gradient would travel as 0, silently.

    Args:
        compression: the one in the configuration.
        configured_precision: the precision in the configuration.
        used_precision: the one that is computed in, which without a GPU may be another one.
    """
    if compression != "fp16" or used_precision.startswith("16"):
        return compression, None
    reason = f"in {used_precision} nothing scales the loss, and gradients below 6e-8 would be lost"
    if configured_precision.startswith("16") or configured_precision == "auto":
        return "bf16", f"trainer.gradient_compression=bf16 instead of fp16: {reason}"
    raise UserError(f"trainer.gradient_compression=fp16 needs trainer.precision=16-mixed: {reason}. HINT: bf16 has room.")


class CompressGradients(Callback):
    """Registers one of PyTorch's communication hooks. (Lightning's own setting does so under CUDA only.)

    The sum over the ranks is rounded to 16 bits, so that with another number of ranks a run agrees to that rounding and no
    better. PowerSGD is not offered: what it carries over from step to step belongs to a rank, and a run would depend on its
    ranks and on its restarts.
    """

    def __init__(self, compression: Compression) -> None:
        self.compression = compression

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wrapped = trainer.strategy.model
        if isinstance(wrapped, DistributedDataParallel) and trainer.world_size > 1:
            wrapped.register_comm_hook(None, _HOOKS[self.compression])
