"""Signals set a flag; all ranks stop at the same step, with a checkpoint.

Lightning's own handlers talk to the other ranks from inside the handler, and hang when the ranks are not in step. Here a
handler only notes the signal; at every step boundary the ranks compare notes on the CPU, asynchronously: what one step
starts, the next reads, so nobody waits. A second signal stops at once.
"""

import logging
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_SAME = 2.0  # seconds: a terminal and a launcher may both pass on one Ctrl-C


class Signals:
    """Stands in for Lightning's signal connector, and keeps what arrived."""

    received_sigterm = False  # Lightning asks before every batch; the answer that costs nothing

    def __init__(self) -> None:
        self.noted: signal.Signals | None = None
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def register_signal_handlers(self) -> None:
        for number in EXIT_CODES:
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: then signals are not ours to handle
                return

    def teardown(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.noted is None:
            self.noted, self._since = signal.Signals(number), now
        elif now - self._since > _SAME:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class StopTogether(Callback):
    """Stops all ranks at the same step when any of them was asked to."""

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self._group: Any = None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._answer: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")

    def _asked(self) -> int:
        """The signal that any rank had noted when it last came by here, or 0."""
        if self._group is None:
            return self.signals.noted or 0
        if self._answer is not None:
            self._answer.wait()
            self._answer = None
            if number := int(self._flag):
                return number
        self._flag.fill_(self.signals.noted or 0)
        self._answer = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and (number := self._asked()):
            self._stop(trainer, number)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if number := self._asked():
            self._stop(trainer, number)

    def on_test_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if number := self._asked():
            self._stop(trainer, number)

    def on_predict_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if number := self._asked():
            self._stop(trainer, number)

    def _stop(self, trainer: Trainer, number: int) -> None:
        name = signal.Signals(number).name
        if trainer.state.fn == "fit" and not trainer.sanity_checking and trainer.checkpoint_callback is not None:
            path = Path(trainer.strategy.broadcast(str(trainer.checkpoint_callback.dirpath))) / "last.ckpt"  # type: ignore[attr-defined]
            trainer.save_checkpoint(path)
            log.info("Stopped by %s after step %d. To go on: --ckpt_path %s", name, trainer.global_step, path)
        else:
            log.info("Stopped by %s.", name)
        raise SystemExit(EXIT_CODES[signal.Signals(number)])
