"""Ends a rank that lost another one, and whose main thread does not notice.

Gloo's connections are closed with the process that had them, and the main thread gets an error. A device that waits in a
collective of NCCL waits on, and so does the main thread that waits for the device.
"""

import logging
import time
from pathlib import Path

from project.errors import Cause
from project.survive.failure import WHOLE, advice
from project.survive.hang.beside import WardenProcess
from project.survive.hang.leaving import RankContext, exit_process, flush, run_with_timeout
from project.survive.news import LOST_RANKS

log = logging.getLogger(__name__)

_UNTIL_NOTICED = 4.0  # seconds for the main thread to notice, which then says more and leaves nothing half done
_UNTIL_WRITTEN = 60.0  # for a checkpoint that is being written
_PATIENCE = 1.0  # for a terminal or a disk


def exit_due(writing: bool) -> bool:
    """Returns whether the main thread has had enough time to notice that a rank is lost. `writing`: a checkpoint is being
    written meanwhile.
    """
    return LOST_RANKS.since is not None and time.monotonic() - LOST_RANKS.since > (
        _UNTIL_WRITTEN if writing else _UNTIL_NOTICED
    )


def exit_after_loss(context: RankContext, warden: WardenProcess | None) -> None:
    """Reports which rank is lost, once on each host, and ends this process."""
    cause = LOST_RANKS.cause
    assert cause is not None
    if warden is not None:
        warden.send(why=cause.text, where=cause.where, traceback=cause.traceback, step=context.beat.step)
        warden.announce_exit()
    if context.is_reporter({*(LOST_RANKS.failures or LOST_RANKS.deaths)}):
        run_with_timeout(_PATIENCE, lambda: _report(cause, context.folder))
    run_with_timeout(_PATIENCE, flush)
    exit_process(context, LOST_RANKS.exit_code)


def _report(cause: Cause, folder: Path | None) -> None:
    hint = "HINT: see the error of that rank." if LOST_RANKS.failures else advice(folder)
    text = f"lost another rank: {cause.text} This one waits for it in a call that does not notice, and is ended. {hint}"
    log.error(text, extra={WHOLE: f"{text}\n{cause.traceback}"})
