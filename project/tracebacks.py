"""Folds tracebacks: the frames of a user's own code stay whole, those of libraries and of this project are only counted."""

import re
import sysconfig
import traceback
from pathlib import Path
from typing import ClassVar

_FRAME = re.compile(
    r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>.*)\n(?: {4,}.*\n)*(?: *\[Previous line .*\n)?', re.MULTILINE
)
_IN_LOADER = re.compile(r"Caught (\w+) in DataLoader worker process \d+\.\n")
_HEAD = "Traceback (most recent call last):"
_PACKAGES = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_PROJECT = Path(__file__).parent


class Folded:
    """The traceback of an error. Also of one in a loader process, whose text quotes the traceback that was seen there."""

    shows_all: ClassVar[bool] = False
    """Whether `text` leaves out nothing (--debug true)."""

    def __init__(self, error: BaseException) -> None:
        self.whole = "".join(traceback.format_exception(error)).rstrip()
        frames = list(_FRAME.finditer(f"{self.whole}\n"))
        own = [frame for frame in frames if not library_of(frame["file"])]
        self.where = f"{own[-1]['file']}, line {own[-1]['line']}, in {own[-1]['name']}" if own else ""
        """File, line and function of the user's code, from which the error came; '' where none was in the way."""
        self.text = self.whole
        """What a user reads: the whole traceback where there is no frame of the user's."""
        names = dict.fromkeys(filter(None, (library_of(frame["file"]) for frame in frames)))
        if own and names and not self.shows_all:
            text = _FRAME.sub(lambda frame: "" if library_of(frame["file"]) else frame[0], f"{self.whole}\n").rstrip()
            without = f"without {len(frames) - len(own)} frame(s) of {', '.join(names)}; --debug true shows them"
            self.text = text.replace(_HEAD, f"Traceback (most recent call last, {without}):", 1)


def loader_error(error: BaseException) -> str:
    """Returns the type and text of an error as it was raised in a loader process, or ''. torch's text has them at its end."""
    match = _IN_LOADER.match(text := str(error))
    lines = re.findall(rf"^(?:\S+\.)?({match[1]}(?:: .*)?)$", text, re.MULTILINE) if match else []
    return f"{lines[-1]} (in a loader process)" if lines else ""


def title(error: BaseException) -> str:
    """Returns the type of an error and the first line of its text."""
    return loader_error(error) or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def library_of(file: str) -> str:
    """Returns the library that a file belongs to, or this project; '' for the user's own."""
    path = Path(file)
    if (at := next((index for index, part in enumerate(path.parts) if part in _PACKAGES), None)) is not None:
        return path.parts[at + 1].removesuffix(".py")
    if path.is_relative_to(_PROJECT):
        return "project"
    return "Python" if file.startswith("<") or path.is_relative_to(_STANDARD_LIBRARY) else ""
