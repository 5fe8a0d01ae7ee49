"""Identifies the code: the commit of a checkout, or the one that an image was built from, and a hash of the source files.

An image has no .git: where it is built,

    python -m project.cluster.code COMMIT        writes the commit into a file beside the package

together with that hash, so that code which was changed afterwards, or mounted over it, is not taken for it.
"""

import hashlib
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import project

_PACKAGE = Path(project.__file__).parent
_NOTE = "COMMIT"  # the file, in the folder that holds the package


def sources(package: Path = _PACKAGE) -> str:
    """Returns a hash of the package's source files as they are now."""
    files = sorted(package.rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


@cache
def commit(package: Path = _PACKAGE) -> str:
    """Returns the commit of a checkout or of an image ('+' for changed files); 'none' for an installed package."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, timeout=5).stdout.strip()

    with suppress(OSError, subprocess.TimeoutExpired):
        if git("rev-parse", "--show-toplevel") == str(package.parent):
            return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    with suppress(OSError, ValueError):
        name, hashed = (package.parent / _NOTE).read_text().split()
        return name if hashed == sources(package) else f"{name}+"
    return "none"


def note(name: str, package: Path = _PACKAGE) -> None:
    """Writes the commit of the package's code into a file beside the package."""
    (package.parent / _NOTE).write_text(f"{name} {sources(package)}\n")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1]:
        note(sys.argv[1])
