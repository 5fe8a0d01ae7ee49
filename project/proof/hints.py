"""Says where a difference likely comes from, and how to mend it."""

import re
from pathlib import Path
from typing import Protocol

from project.proof.evidence import Finding

_SAVE = "HINT: make it a buffer (register_buffer), or save it in on_save_checkpoint and take it back in on_load_checkpoint"
_DRAW = (
    "HINT: draw from torch's, Python's or NumPy's own generators, which are seeded for each micro-batch; or save the "
    "generator's state in on_save_checkpoint and take it back in on_load_checkpoint"
)
_CLOCK = (
    "HINT: nothing that a sample depends on may come from the clock, os.urandom, hash() of a string, the order of a folder or a "
    "set, or a generator of its own; look at the dataset, collate_fn and on_after_batch_transfer"
)
_WORKERS = (
    "HINT: a dataset or collate_fn that remembers something from item to item is copied into each loader process; make an item "
    "a function of its index"
)
_ORDER = "HINT: a plain DataLoader over a dataset with indices is dealt out in the same order on any number of ranks"


class Tried(Protocol):
    """What is asked of a trial."""

    @property
    def kill(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> int: ...


def hints(trial: Tried, finding: Finding, folder: Path) -> list[str]:
    """Returns lines for people."""
    assert finding.first is not None
    kind = finding.first.kind
    lines = [f"Before this step, this differed, and is in no state that is compared: {one}." for one in finding.attributes]
    lines += _from_log(folder)
    if finding.attributes:
        generator = any(re.search(r"Generator|random\.|RandomState", one) for one in finding.attributes)
        lines.append(_DRAW if generator else _SAVE)
    elif kind in ("samples", "validation samples"):
        lines.append(_WORKERS if trial.name == "workers" else _ORDER if trial.ranks > 1 else _CLOCK)
    elif kind == "other states":
        lines.append("HINT: what is saved there must be a function of the steps, and be taken back when the run resumes")
    elif trial.kill or trial.name == "twice":
        lines.append(
            "HINT: something that the step depends on is in no checkpoint: a global variable, a closure, an object without a state, "
            "the clock, a generator of its own"
        )
    return lines


def _from_log(folder: Path) -> list[str]:
    """What the run itself said of it."""
    path = folder / "lightning_logs/prove/log.txt"
    said = re.findall(r"The \w+ loader \(.*gives its samples in its own order.*", path.read_text()) if path.is_file() else []
    return list(dict.fromkeys(said))
