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


LINES = {
    "docs/tutorial.md": (
        "1 host x 1 process x micro-batch 16 x accumulation 6 = global batch 96",
        "exit code 137",
        "Resumes from ",
        "1 host x 3 processes x micro-batch 16 x accumulation 2 = global batch 96",
        "whole and killed are the same to the last bit up to step 500 of both, on 1 and 3 ranks.",
        "Side by side: lightning_logs/compared.html",
    ),
    "docs/howto/move.md": (
        "runs/wave/checkpoints/step-000000250.ckpt",
        "1 host x 1 process x micro-batch 16 x accumulation 2 = global batch 32",
        "step 250 (the best by val_loss: ",
    ),
    "docs/howto/gan.md": ("1 host x 1 process x micro-batch 64 x accumulation 1 = global batch 64",),
    "docs/howto/pandas.md": ("micro-batch 32 x accumulation 6 = global batch 192",),
    "docs/howto/lora.md": ("micro-batch 8 x accumulation 6 = global batch 48",),
    "docs/howto/detection.md": ("micro-batch 4 x accumulation 6 = global batch 24",),
    "docs/howto/spot.md": (
        "exit code 137",
        "Brings the run from ",
        "Resumes from ",
        "1 host x 2 processes x micro-batch 16 x accumulation 3 = global batch 96",
    ),
    "docs/howto/sweep.md": ("   4  model.init_args.width=256", "Side by side: lightning_logs/compared.html"),
}
"""What a page shows, and its commands print on any machine."""
NEEDS = {"docs/howto/pandas.md": ["pandas"], "docs/howto/lora.md": ["transformers", "peft"]}
BUILDS_ON = dict.fromkeys(("docs/howto/sweep.md", "docs/howto/spot.md"), "docs/tutorial.md")


@pytest.mark.parametrize("page", LINES)
def test_the_commands_of_a_page_print_what_it_shows(page, tmp_path):
    for library in NEEDS.get(page, []):
        pytest.importorskip(library)
    if page in BUILDS_ON:
        written(BUILDS_ON[page], tmp_path)
    output = run_page(page, tmp_path)
    for line in LINES[page]:
        assert line in PAGES[page]
        assert line in output, output


def test_all_pages_with_commands_are_run():
    """Slurm's has a test among those of a real Slurm."""
    pages = {page for page in PAGES if page.startswith("docs/howto/")}
    assert pages - LINES.keys() == {"docs/howto/slurm.md"}
