"""The tutorial and the how-to pages: their commands run in their order, and print what the pages show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, environment
from tests.test_readme import PAGES, written

pytestmark = pytest.mark.slow


def run_page(page: str, folder: Path) -> str:
    """Writes the files of a page, runs its commands in one shell, and returns what they print."""
    written(page, folder)
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=environment(PATH=path, OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def shown(page: str) -> list[str]:
    """Returns the lines that a page shows as printed, without times, folders, and figures of a machine's speed."""
    blocks = re.findall(r"^```\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line != "..."]
    return [line for line in lines if not re.match(r"\d\d:\d\d:\d\d", line)]
