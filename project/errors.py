"""What a user can mend, and the exit codes that say what to do next."""

WRONG = 2
"""A wrong key or flag, which is as wrong the next time."""
TRY_AGAIN = 75
"""A temporary failure, says sysexits.h. The same command goes on."""


class UserError(ValueError):
    """Something that the user wrote, or a machine that the user runs on: its message is the cause and the fix, on one line.

    Every other error is taken for a bug, and keeps its traceback.
    """
