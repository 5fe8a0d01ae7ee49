"""Ends a run that failed: the rank at fault reports the cause, once and last; the others report only that they lost it.

An error that the user can correct (a UserError, a setting that Lightning refuses) is one line. Everything else is a traceback,
folded: the frames of the user's own code stay whole, those of libraries and of this project are only counted.
"""

import json
import logging
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from typing import Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

from project.checkpoints.reading import checkpoints_in
from project.cluster.connection import FAILED, close_connections
from project.cluster.oom import OOM_KILL, TO_LOWER, OomKills
from project.cluster.place import MORE_SHARED_MEMORY, host, shared_memory
from project.errors import SMALLER_BATCH, TRY_AGAIN, WRONG, Cause, NonFiniteError, UserError
from project.launch.fork_server import tell_supervisor
from project.survive.exit import flush_and_exit
from project.survive.signals import EXIT_CODES, SIGNALS, code_of_rank
from project.tracebacks import Folded, loader_error, title
from project.untrusted import LONGEST_CAUSE, shortened

log = logging.getLogger(__name__)

# Gloo's errors have no type of their own: they name its source files, or are one of these. NCCL's are a DistError, but those of
# the library that torch 2.15 calls nccl2. Words that anybody may use count only where the error was not raised by code of the
# user's own.
_LIBRARY_ERROR = re.compile(r"\[\S*gloo/\S+:\d+\]|NCCL [\w ]+ failed|NCCL communicator was aborted")
_LOST_CONNECTION = re.compile(
    rf"gloo/|TCPStore|Connection (closed|reset) by peer|Broken pipe|connectFullMesh|recvValue|{_LIBRARY_ERROR.pattern}", re.I
)
_PROJECT, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_CONNECTION_CODE = (
    *(f"{_TORCH / name}{os.sep}" for name in ("distributed", "autograd", "nn/parallel")),
    str(_TORCH / "_ops.py"),  # calls compiled operators, as functional collectives are
    f"{_PROJECT}{os.sep}",
)
# Seconds. The others notice at once that a rank is gone, and wait for it to say why; a launcher ends them when it has.
# Of several ranks with the same error, rank 0 is first, and its launcher ends the rest before they repeat it.
_FIRST, _SECOND, _LINGER, _LONG_LINGER = 1.0, 2.0, 6.0, 20.0
EXITING = threading.Event()
"""Set when the watchdog's thread ends this process: an error that the main thread gets from that is no news."""
BY_COMMAND = threading.Event()
"""Set where the command line runs the fit: the same command resumes it."""
WHOLE = "whole"
"""The attribute of a log record with the text for a file, where a terminal gets a shorter one."""

# torch.compile's, on a CPU and on a GPU, where it finds no compiler.
_NO_COMPILER = re.compile(r"InvalidCxxCompiler|Failed to find C compiler")
# Lightning's, where a device is gone: on another host the same configuration works.
_TOO_FEW_DEVICES = re.compile(r"machine only has|can not run on your system|No supported gpu")
_MIXED = "mixed torch.Tensor and DTensor"  # torch's, where a shard meets a tensor
_SHARD = (
    "with strategy=sharded a parameter of a block is a shard while its block is not called. For a penalty on weights, use the "
    "optimiser's weight_decay; call the block itself, not layers within it; or set the strategy's blocks to what is called."
)
_OF_THE_MACHINE = (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
_OF_A_PATH = (FileNotFoundError, IsADirectoryError, NotADirectoryError, FileExistsError, PermissionError)
# Errors of a setting, with its name, that Lightning raises as those of a bug.
_SETTING_ERROR = re.compile(r"`strategy='ddp_find_unused_parameters_true'`|does not allow for gradient clipping")
# What torch raises in whatever the main thread does when one of its loader processes has ended.
_LOADER_ERROR = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([^.]+)|exited unexpectedly(.*))"
)

_OOM_KILLS = OomKills()

_UNTIL_NOTICED = 4.0  # seconds for the main thread to notice, which then says more and leaves nothing half done
_UNTIL_WRITTEN = 60.0  # for a checkpoint that is being written

Kind = Literal["mendable", "loader", "lost", "crash"]


def kind(error: BaseException) -> Kind:
    """Returns whose fault an error is: the user's to correct, a loader process's end, another rank's, or a bug's."""
    if _loader_failure(error):
        return "loader"
    if isinstance(error, (UserError, NonFiniteError, MisconfigurationException)) or any(
        pattern.search(str(error)) for pattern in (_NO_COMPILER, _SETTING_ERROR)
    ):
        return "mendable"
    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and _is_connection_error(error)):
        return "lost"
    return "crash"


def _is_connection_error(error: RuntimeError) -> bool:
    """Returns whether torch's or this project's code, and not the user's, has raised an error of a connection."""
    if not _LOST_CONNECTION.search(str(error)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    # The last frame is Python's: the one that raised, or that called what is compiled.
    return not frames or bool(_LIBRARY_ERROR.search(str(error))) or frames[-1].filename.startswith(_CONNECTION_CODE)


def _loader_failure(error: BaseException | None) -> str:
    """Returns how a loader process ended and a hint, if that is the cause of an error, or ''. The place where torch raised it
    (in the forward pass, say, or in a hook) does not matter.
    """
    matches, killed_by = [], ""
    while error is not None:
        matches += _LOADER_ERROR.findall(str(error)) if isinstance(error, RuntimeError) else []
        killed_by = killed_by or _signal_of_worker(error)
        error = error.__cause__ or error.__context__
    if not matches:
        return ""
    pids, name, code = max(matches, key=lambda match: len(match[1]))  # the signal's name, if any of them has it
    name = name or killed_by
    if not name:
        exit_code = re.search(r"exit code:? (\d+)", code)
        how = f"has ended with exit code {exit_code[1]}" if exit_code else "has ended"
        return (
            f"Loader process {pids} of this rank {how}, and has sent no error; if it had one, that stands above. HINT: "
            "--data.num_workers 0 shows what the dataset does."
        )
    number = next((int(candidate) for candidate in signal.valid_signals() if signal.strsignal(candidate) == name.strip()), 0)
    hint: dict[int, str] = {
        signal.SIGKILL: "see who ended it; where it was for memory, set data.num_workers or data.batch_size lower.",
        signal.SIGBUS: f"{shared_memory()} may be full: {MORE_SHARED_MEMORY}",
    }
    crashed = "it crashed in what the dataset calls: --data.num_workers 0 shows where."
    how = f"signal {number}{_OOM_KILLS}" if number else name
    return f"Loader process {pids} of this rank was killed by {how}. HINT: {hint.get(number, crashed)}"


def _signal_of_worker(error: BaseException) -> str:
    """Returns the name of the signal that killed a loader process where torch's error has none: torch has asked whether the
    process is alive before it was notified of its end, and keeps the dead ones in a variable of the frame that raised.
    """
    workers = [
        worker for frame, _ in traceback.walk_tb(error.__traceback__) for worker in frame.f_locals.get("failed_workers", ())
    ]
    return next((signal.strsignal(-worker.exitcode) or "" for worker in workers if (worker.exitcode or 0) < 0), "")


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a program that an error ends: 2 where the same configuration would fail again.

    What a disk, a network or a device is the cause of may work the next time, whatever has been made of it on the way.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _OF_THE_MACHINE) and not isinstance(cause, _OF_A_PATH):
            return 1
        cause = cause.__cause__
    if _TOO_FEW_DEVICES.search(str(error)):
        return 1
    if isinstance(error, UserError):
        return error.exit_code
    return WRONG if isinstance(error, MisconfigurationException) or _SETTING_ERROR.search(str(error)) else 1


def cause_of(error: BaseException) -> Cause:
    """Returns why a run ends by an error: where this rank has only lost another one, how that one ended."""
    error = error.__cause__ if isinstance(error, SystemExit) and error.__cause__ else error
    which = kind(error)
    if which == "lost" and (cause := LOST_RANKS.cause):
        return cause
    if which == "loader":
        return Cause(_loader_failure(error).partition(" HINT:")[0], kind="lost")
    if which == "crash":
        folded = Folded(error)
        return Cause(title(error), folded.where, folded.text)
    text = loader_error(error) or str(error).strip().partition("\n")[0]
    of_failure = "lost" if which == "lost" else "nan" if isinstance(error, NonFiniteError) else ""
    return Cause(text if isinstance(error, (UserError, NonFiniteError)) else title(error), kind=of_failure)


def resumption(folder: Path | None, changed: bool = False) -> str:
    """Returns whether there is a checkpoint in a run's folder to resume from, in a sentence. `changed`: not as it was."""
    newest = checkpoints_in(folder / "checkpoints")[-1:] if folder else []
    if not BY_COMMAND.is_set():
        known = f'trainer.fit(..., ckpt_path="{newest[0]}")' if newest else "trainer.fit with ckpt_path"
        return "There is no checkpoint yet." if folder and not newest else f"{known} resumes from the newest checkpoint."
    subject = "Then it" if changed else "The same command"
    if folder and not newest:
        return f"There is no checkpoint yet: {subject[0].lower()}{subject[1:]} begins anew."
    return f"{subject} resumes from {newest[0] if newest else 'the newest checkpoint'}."


def message(error: BaseException, folder: Path | None = None) -> str:
    """Returns the text to print for an error: a line for what the user can correct, else the traceback. `folder`: the run's."""
    which = kind(error)
    if which == "loader":
        text = _loader_failure(error)
        return f"{text} {resumption(folder, changed=True)}" if folder and OOM_KILL in text else text
    if which == "crash":
        text = Folded(error).text
        if isinstance(error, torch.OutOfMemoryError):
            text += f"\nHINT: {SMALLER_BATCH}"
        if _MIXED in str(error):
            text += f"\nHINT: {_SHARD}"
        return text
    if _NO_COMPILER.search(str(error)):
        return (
            "model.compile needs a C++ compiler, and there is none here. HINT: install g++ (into an image: "
            "--build-arg PACKAGES=g++), or set model.compile=none."
        )
    return shortened(loader_error(error) or str(error).strip(), LONGEST_CAUSE) or type(error).__name__


def report_error(
    error: BaseException,
    rank: int,
    children: Sequence[Popen[bytes]] = (),
    folder: Path | None = None,
    at: str = "",
) -> int:
    """Reports the error that ends this process, and returns its exit code.

    Args:
        error: the error.
        rank: this rank.
        children: the ranks that this one launched.
        folder: the run's folder, where it is known.
        at: how far the run has come, as the end of a sentence; '' where that is not known.
    """
    if EXITING.is_set():
        threading.Event().wait()  # the watchdog's thread ends this process
    SIGNALS.teardown()  # from here on a launcher that wants this process to end has its way
    if SIGNALS.noted == signal.SIGTERM and rank > 0 and not dist.is_initialized():
        return 1  # told to end before the ranks were connected: another one has said what is wrong
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    which = kind(error)
    FAILED.set()
    if which == "lost":
        if not _report_lost_rank(error, rank, children, folder):
            # One that has reported its error ends soon, but for the load: its exit code counts.
            _wait_for_children(children, _LONG_LINGER if children and LOST_RANKS.failures else _LINGER)
            if codes := {code_of_rank(child.poll() or 0) for child in children} - {0, TRY_AGAIN}:
                return WRONG if WRONG in codes else 1  # it has ended by itself, and would again
        return LOST_RANKS.exit_code
    if not alone:
        close_connections(_FIRST)
    if not alone or rank > 0:
        time.sleep(_FIRST if rank == 0 else _SECOND)
    text = message(error, folder)
    if which == "crash" and at:
        resumes = f" {resumption(folder, changed=isinstance(error, torch.OutOfMemoryError))}" if folder else ""
        text = f"The run has ended {at}.{resumes}\n{text}"
    if which == "crash" and tell_torchrun(f"rank {rank}, {host()}: {text}"):  # its own 'host' is often localhost
        text = f"{title(error)} (torchrun prints the traceback)"
    elif which == "crash" and not at:
        text = f"\n{text}"
    log.error(text, extra={WHOLE: text.partition("\n")[0] + f"\n{Folded(error).whole}"} if which == "crash" else None)
    for child in children:
        child.send_signal(signal.SIGTERM)
    tell_supervisor(reported=rank)
    return exit_code(error)


def tell_torchrun(text: str) -> bool:
    """Writes a message for torchrun, which has the last word, and prints what it finds there; returns whether it is there."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": message}))
    return bool(file)


# The death of another rank -------------------------------------------------------------------------------------------


class LostRanks:
    """Records deaths and failures of other ranks. The watchdog's thread receives them; a moment earlier, the main thread gets
    an error from a closed connection.
    """

    def __init__(self) -> None:
        self.deaths: dict[int, Cause] = {}
        """Of ranks that were killed, as their wardens report."""
        self.failures: dict[int, Cause] = {}
        """Of ranks that an error ends, as they report themselves."""
        self.unexplained = False
        """Whether a rank is lost and nothing reports how: its warden, and so its host, is lost too."""
        self.since: float | None = None
        """When the first report came; None: no rank is lost."""
        self._received = threading.Event()

    def note(self, rank: int, cause: Cause, has_failed: bool) -> None:
        """Records how a rank was lost, and ends `wait`. `has_failed`: by an error, and not killed."""
        (self.failures if has_failed else self.deaths).setdefault(rank, cause)
        self.since = self.since or time.monotonic()
        self._received.set()

    @property
    def cause(self) -> Cause | None:
        """Returns why ranks are lost, where anything has reported that: a failure explains the deaths that follow it."""
        if not (causes := [*(self.failures or self.deaths).values()]):
            return None
        return Cause(
            " ".join(cause.text for cause in causes),
            causes[0].where,
            causes[0].traceback,
            causes[0].kind if self.failures else "lost",
        )

    @property
    def exit_code(self) -> int:
        """Returns the exit code of the remaining ranks: 'try again' where one was killed or its host is lost, 1 after an error,
        which would occur again.
        """
        return TRY_AGAIN if (self.deaths or self.unexplained) and not self.failures else 1

    def exit_due(self, writing: bool) -> bool:
        """Returns whether the main thread has had the time to notice. `writing`: a checkpoint is being written meanwhile."""
        patience = _UNTIL_WRITTEN if writing else _UNTIL_NOTICED
        return self.since is not None and time.monotonic() - self.since > patience

    def wait(self, seconds: float) -> bool:
        """Waits until a death or a failure is known, or so long; returns whether one is."""
        return self._received.wait(seconds)

    def clear(self) -> None:
        """Removes all records: another run begins in this process."""
        self.deaths.clear()
        self.failures.clear()
        self.unexplained = False
        self.since = None
        self._received.clear()


LOST_RANKS = LostRanks()


def _report_lost_rank(error: BaseException, rank: int, children: Sequence[Popen[bytes]], folder: Path | None) -> bool:
    """Reports that another rank is lost, and returns whether it is known which was killed: then one rank on each host reports
    it. Otherwise each reports its own error, and the rank at fault may have more to report.
    """
    if not (note_killed(children, rank) or LOST_RANKS.deaths):
        failed = LOST_RANKS.cause  # which that rank reports itself
        text = f"{failed.text.partition(': ')[0]}: see its error." if failed else message(error).splitlines()[0]
        log.warning("lost another rank: %s", text, extra={WHOLE: f"lost another rank: {failed.whole}"} if failed else None)
    elif (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0":
        report_killed(folder)
    return bool(LOST_RANKS.deaths)


def note_killed(children: Sequence[Popen[bytes]], rank: int = 0) -> bool:
    """Records which of the ranks that this one has launched were killed, and returns whether any was."""
    codes = {number: code for number, child in enumerate(children, rank + 1) if (code := child.poll() or 0) < 0}
    killed = {number: -code for number, code in codes.items() if -code not in EXIT_CODES}
    for number, by in killed.items():
        LOST_RANKS.note(number, Cause(f"rank {number} on {host()} was killed by signal {by}{_OOM_KILLS}."), has_failed=False)
    return bool(killed)


def report_killed(folder: Path | None) -> None:
    """Reports which ranks were killed, and what to do."""
    log.error("lost another rank: %s %s", " ".join(death.text for death in LOST_RANKS.deaths.values()), advice(folder))


def advice(folder: Path | None) -> str:
    """Returns what to do after a rank was killed, and whether there is a checkpoint to resume from."""
    if any(OOM_KILL in death.text for death in LOST_RANKS.deaths.values()):  # the kernel would do so again
        return f"{TO_LOWER} {resumption(folder, changed=True)}"
    return resumption(folder)


def exit_at_once(error: BaseException | None) -> None:
    """Ends the process with the program's exit code, without Python's cleanup, where NCCL might wait for a dead rank for ever.

    Args:
        error: the exception that ends the program; None where it has succeeded.
    """
    code: object = error.code if isinstance(error, SystemExit) else 130 if isinstance(error, KeyboardInterrupt) else error
    logging.shutdown()
    flush_and_exit(code)


def _wait_for_children(children: Sequence[Popen[bytes]], seconds: float) -> None:
    """Waits until all launched ranks have ended, one of them has failed, or for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        codes = [code if (code := child.poll()) is None else code_of_rank(code) for child in children]
        if codes and (None not in codes or {*codes} - {None, 0, TRY_AGAIN}):
            return
        time.sleep(0.05)
