"""The end of a rank that was told of another's, and whose main thread does not notice.

Gloo's connections are closed with the process that had them, and the main thread gets an error. A device that waits in a
collective of NCCL waits on, and so does the main thread that waits for the device.
"""

import logging
import time

from project.survive.hang.beside import Beside
from project.survive.hang.leaving import Scene, flush, leave, within
from project.survive.news import NEWS

log = logging.getLogger(__name__)

_ALONE = 4.0  # seconds for the main thread to notice, which then says more and leaves nothing half done
_WRITING = 60.0  # for a checkpoint that is being written
_PATIENCE = 1.0  # for a terminal or a disk


def due(writing: bool) -> bool:
    """Returns whether the main thread has had its time. `writing`: a checkpoint is being written beside it."""
    return NEWS.since is not None and time.monotonic() - NEWS.since > (_WRITING if writing else _ALONE)


def end(scene: Scene, warden: Beside | None) -> None:
    """Reports which rank is lost, once on each host, and ends this process."""
    lost = NEWS.failures or NEWS.deaths
    why = " ".join(lost.values())
    if warden is not None:
        warden.tell(why=f"lost another rank: {why}")
        warden.ends()
    if scene.speaks(set(lost)):
        hint = "HINT: see the error of that rank." if NEWS.failures else "The same command goes on from the newest checkpoint."
        text = f"lost another rank: {why} This one waits for it in a call that does not notice, and is ended. {hint}"
        within(_PATIENCE, lambda: log.error(text))
    within(_PATIENCE, flush)
    leave(scene, NEWS.code)
