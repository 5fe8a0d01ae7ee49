"""A run has a name and a folder of its own: lightning_logs/NAME."""

import re
from datetime import datetime
from pathlib import Path

RUNS = "lightning_logs"


def new_run(root: Path, name: str | None, kind: str) -> Path:
    """Makes the folder of a new run under `root`. Without a name it is called after its kind and the time.

    Two runs never share a folder: making it is what takes the name.
    """
    runs = root / RUNS
    if name is not None:
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise ValueError(f"A run's name is made of letters, digits, '.', '_' and '-', and {name!r} is not.")
        try:
            (runs / name).mkdir(parents=True)
        except FileExistsError:
            raise ValueError(f"There is a run {name} already, in {runs / name}. HINT: choose another --run.") from None
        return runs / name
    stem = f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while True:
        folder = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
