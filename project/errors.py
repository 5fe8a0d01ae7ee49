"""What a user can mend."""


class UserError(ValueError):
    """Something that the user wrote, or a machine that the user runs on: its message is the cause and the fix, on one line.

    Every other error is taken for a bug, and keeps its traceback.
    """
