"""Tells a webhook, or a command, that a run has failed, hangs, has lost a process, is slowed down or has ended.

A small process of its own sends the messages (`watch/notifier.py`), so that no network can delay the training.
"""

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from project.cluster.place import host
from project.errors import UserError
from project.masking import masked_text
from project.tracebacks import title
from project.typed import typed
from project.watch import notifier
from project.watch.history import FILE

log = logging.getLogger(__name__)

Occasion = Literal["start", "end", "stopped", "failure", "nan", "hang", "lost", "straggler"]
_LONGEST = 500  # characters of a reason
_DELIVERY = 5.0  # seconds that a run that has ended waits: in a container, the message would end with it


class Notify(Callback):
    """Reports a run's events, on rank 0. A message that can't be sent is logged, and training continues.

    Args:
        webhook: the environment variable that holds the address of a webhook of Slack or one like it. The address itself is a
            secret, and never stands in YAML.
        command: a command that is run for each message: as JSON on its input, as text in NOTIFY_TEXT.
        occasions: what is told: start, end, stopped (by a signal), failure, straggler; nan, hang and lost are failures, and
            may be named alone.
        every: seconds between two messages of a kind; what is held back is counted.
    """

    def __init__(
        self,
        webhook: str | None = None,
        command: str | None = None,
        occasions: Sequence[Occasion] = ("end", "stopped", "failure", "straggler"),
        every: float = 60.0,
    ) -> None:
        if webhook is not None and not re.fullmatch(r"[A-Za-z_]\w*", webhook):
            raise UserError(
                "notify.webhook names an environment variable, and holds no address: who knows that can write to your channel. "
                "HINT: export SLACK_WEBHOOK=https://..., and notify.webhook: SLACK_WEBHOOK."
            )
        if every < 0:
            raise UserError(f"notify.every is a number of seconds, and not {every:g}.")
        try:
            self.command = shlex.split(command or "")
        except ValueError as error:
            raise UserError(f"notify.command is no command: {error}.") from error
        self.webhook, self.occasions, self.every = webhook, tuple(occasions), every
        self._process: subprocess.Popen[bytes] | None = None

    def __reduce__(self) -> tuple[type["Notify"], tuple[object, ...]]:
        """Pickles the arguments only: the process belongs to this one."""
        return type(self), (self.webhook, shlex.join(self.command) or None, self.occasions, self.every)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (self.webhook or self.command) or not trainer.is_global_zero or typed(trainer).fast_dev_run:
            return
        if self.webhook and not os.environ.get(self.webhook):
            log.warning("notify.webhook: the environment has no %s, and nobody is told. HINT: export it.", self.webhook)
        life = Path(trainer.default_root_dir).absolute() / FILE
        if self.command and not shutil.which(self.command[0]):
            text = f"notify.command: there is no program {self.command[0]} on {host()}."
            if not life.is_file():
                raise UserError(f"{text} HINT: install it, write its whole path, or leave notify.command out.")
            log.warning("%s Nobody is told, and the training continues.", text)  # a run that resumes on another host, say
        facts = {
            "life": str(life),
            "begin": life.stat().st_size if life.is_file() else 0,
            "run": life.parent.name,
            "host": host(),
            "webhook": self.webhook,
            "command": self.command,
            "on": self.occasions,
            "every": self.every,
        }
        try:
            words = [sys.executable, "-I", "-S", notifier.__file__]
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
            self._tell(json.dumps(facts))
        except OSError as error:
            log.warning("notify: the process that sends messages can't be started: %s. Training continues.", error)

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Passes on the cause of a failure, in case the run has not begun to train: no file has a record of it then."""
        self._tell(masked_text(title(exception))[:_LONGEST])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Waits a moment for the last message, when the run is over."""
        self._tell("ended")
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                process.communicate(timeout=_DELIVERY)  # which closes its input first
