"""Says where a difference likely comes from, and how to mend it."""

import re
from pathlib import Path

from project.proof.evidence import Finding
from project.proof.plan import RUN

_SAVE = "HINT: make it a buffer (register_buffer), or save it in on_save_checkpoint and take it back in on_load_checkpoint."
_DRAW = (
    "HINT: draw from torch's, Python's or NumPy's own generators, which are seeded for each micro-batch; or save the "
    "generator's state in on_save_checkpoint and take it back in on_load_checkpoint."
)
_COUNT = "HINT: what counts a rank's own micro-batches depends on the number of ranks: go by trainer.global_step."
_CLOCK = (
    "HINT: no sample may depend on the clock, os.urandom, the hash of a string, the order of a folder or set, or a generator "
    "of its own: look at the dataset, collate_fn and on_after_batch_transfer."
)
_WORKERS = (
    "HINT: what a dataset or collate_fn remembers from item to item is another in each loader process: make an item a function "
    "of its index."
)
_DEALT = (
    "HINT: a plain DataLoader over a dataset with indices gives the same samples after a kill and on any number of ranks; what "
    "is drawn when the data is set up (random_split) takes a generator with a seed."
)
_RANKS = (
    "HINT: look for what goes by the rank, by batch_idx or by torch.distributed, and for random numbers that are not torch's, "
    "Python's or NumPy's own."
)
_MOVED = (
    "HINT: each rank moves it by its own micro-batches: move it once a step, in on_before_optimizer_step, by what all ranks "
    "have."
)
_HIDDEN = (
    "HINT: the step depends on something that is in no checkpoint: a global variable, a closure, an object without a state, "
    "the clock, a generator of its own."
)


def hints(trial: str, ranks_differ: bool, finding: Finding, folder: Path) -> list[str]:
    """Returns lines for people.

    Args:
        trial: its name.
        ranks_differ: whether it had another number of them.
        finding: what differs.
        folder: of the trial.
    """
    assert finding.first is not None
    kind = finding.first.kind
    lines = [f"It differs there, too, and is in no state that is compared: {one}." for one in finding.attributes]
    lines += (order := _from_log(folder))
    if finding.attributes and kind not in ("samples", "validation samples"):
        generator = any(re.search(r"Generator|random\.|RandomState", one) for one in finding.attributes)
        lines.append(_DRAW if generator else _COUNT if ranks_differ else _SAVE)
    elif kind in ("samples", "validation samples"):
        lines.append(_DEALT if order or ranks_differ else _WORKERS if trial == "workers" else _CLOCK)
    elif kind == "buffers":
        lines.append(_MOVED if ranks_differ else _SAVE)
    elif kind == "other states":
        lines.append("HINT: what is saved there must be a function of the steps, and be taken back when the run resumes.")
    else:
        lines.append(_RANKS if ranks_differ else _HIDDEN)
    return lines


def _from_log(folder: Path) -> list[str]:
    """What the run itself said of it."""
    path = folder / f"{RUN}/log.txt"
    said = re.findall(r"The \w+ loader \(.*gives its samples in its own order.*", path.read_text()) if path.is_file() else []
    return list(dict.fromkeys(said))
