"""The errors that a user can mend, and the exit codes that tell what to do next."""

from collections.abc import Sequence
from dataclasses import dataclass, field

WRONG = 2
"""A configuration that can't work, which is as wrong the next time: no launcher starts it again."""
SMALLER_BATCH = "the micro-batch does not fit. Set data.batch_size lower; data.global_batch_size can stay."
"""The hint for a device that is out of memory."""
TRY_AGAIN = 75
"""A temporary failure, as in sysexits.h. The same command resumes the run."""

LEFT_OUT = 69
"""A host that is not used any more, EX_UNAVAILABLE in sysexits.h: the run resumes without it."""


def listed(names: Sequence[str], most: int = 5) -> str:
    """Returns names as a text, of many the first ones."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class UserError(ValueError):
    """Raised for what the user wrote, or a machine that the user runs on: its message is the cause and the fix, on one line.
    The program ends with exit code 2: the same command would fail again.

    Every other error is taken for a bug, and keeps its traceback.
    """

    exit_code = WRONG


class FaultError(UserError):
    """Raised for what is no fault of the configuration: a host, a disk, a network or a service is not as a run needs it, or a
    check of what was computed fails. The program ends with exit code 1: the same command may work the next time.
    """

    exit_code = 1


@dataclass(frozen=True)
class Cause:
    """The reason for the end of a run, as every place gives it."""

    text: str
    where: str = ""
    """File and line of the user's code that raised the error."""
    traceback: str = field(default="", compare=False)  # which gets longer on its way up
    kind: str = ""
    """'nan', 'hang' or 'lost' (a process or a host); '' for any other failure."""

    @property
    def whole(self) -> str:
        """Returns all that is known, for a log."""
        return "\n".join(filter(None, (self.text, self.traceback)))


def as_user_error(error: Exception, text: str) -> UserError:
    """Returns a UserError that is of an error's class, too: who expects a FileNotFoundError, or Lightning's
    MisconfigurationException, catches it as before. One of a class that is not made of a text is a UserError alone.
    """
    bases = (type(error),) if isinstance(error, UserError) else (UserError, type(error))
    try:
        kind: type[UserError] = type(type(error).__name__, bases, {"__module__": __name__, "__str__": Exception.__str__})
        return kind(text)
    except TypeError:
        return UserError(text)


class NonFiniteError(RuntimeError):
    """Raised on all ranks where a loss or a gradient is not finite. By then rank 0 has reported it, and the path of the newest
    checkpoint; from the command line the program ends with exit code 1.
    """
