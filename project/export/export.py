"""Exports an evaluation's weights and batches to a folder that others can use."""

import json
import logging
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from project.data.self_dealing import SelfDealing
from project.errors import UserError
from project.export import description
from project.export.capture import Capture, Samples, captured, has_forward, pieces, samples
from project.export.check import TOLERANCE, Difference, Outputs, compare, in_batches, loaded, outputs
from project.export.folder import ABOUT, refuse_strangers, staging
from project.export.formats import (
    FILES,
    Format,
    brief,
    named_weights,
    require,
    shared_names,
    silence,
    snippet,
    trace,
    write_onnx,
    write_traced,
    write_weights,
)
from project.export.plain import as_one_file
from project.typed import TypedTrainer

log = logging.getLogger(__name__)

SETTINGS: dict[str, Any] = {
    **{"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": "32-true", "plugins": None},
    **{"sync_batchnorm": False, "gradient_compression": "none", "exact": False, "fast_dev_run": False, "barebones": False},
    **{"overfit_batches": 0.0, "inference_mode": False, "logger": False, "profiler": None, "enable_progress_bar": False},
}
"""Of the Trainer, whatever the run was trained with: one process, on the CPU, in fp32, that leaves nothing but the export."""


def exportable(to: Format | None, batch_size: int | None, target: Path | None) -> Format:
    """Returns the format, if it exists, its libraries are installed and the target is free; called before slow work."""
    if to not in FILES:
        raise UserError(f"export needs a format. HINT: --to {', --to '.join(FILES)}.")
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size is a number of samples, not {batch_size}.")
    require(to)
    if target is not None:
        refuse_strangers(target)
    return to


class Export:
    """A module as it was evaluated, and the way to export it."""

    def __init__(self, module: LightningModule, capture: Capture, of: str, to: Format, batch_size: int | None) -> None:
        self.module, self.to, self.size = module, to, batch_size
        _settle(module, capture)
        self.samples: Samples | None = None
        self.wanted: Outputs = []
        try:
            self.samples = samples(module, capture.batches, of)
            self.batches = pieces(self.samples, batch_size)
            self.wanted = self._called()
        except UserError as error:
            if to != "safetensors":
                raise
            self.samples, self.batches = None, []
            log.warning("Only the weights are compared, and no outputs: %s", str(error).partition(" HINT:")[0])

    def _called(self) -> Outputs:
        """Returns the outputs of the checkpoint's network for the batches."""
        assert self.samples is not None
        try:
            with silence():
                results = outputs(self.module, self.batches)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{type(self.module).__name__}.forward can't take {', '.join(self.samples.names)} of {self.samples.origin}: "
                f"{brief(error)} HINT: give the module an example_input_array."
            ) from error
        if any(np.isnan(value).any() for batch in results for value in batch if value.dtype.kind == "f"):
            raise UserError("The checkpoint's outputs are not numbers (NaN): there is nothing to compare an export with.")
        return results

    def write(self, file: Path, about: dict[str, Any]) -> Difference:
        """Writes the file, and compares its outputs in a fresh process; raises a UserError if they differ."""
        if self.to == "safetensors":
            write_weights(self.module, file, about)
            self._put_back(loaded(self.to, file, []))
            return compare(self.wanted, self._called() if self.samples else [], TOLERANCE[self.to])
        assert self.samples is not None
        program = trace(self.module, self.samples, self.size)
        if self.to == "onnx":
            write_onnx(program, file, self.samples.names)
        else:
            write_traced(program, file)
        results = in_batches(loaded(self.to, file, self.batches), len(self.batches))
        return compare(self.wanted, results, TOLERANCE[self.to])

    def _put_back(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Loads the weights from the file into the module, whose own are overwritten first."""
        part, weights = named_weights(self.module)
        tensors = {name.removeprefix("tensor "): value for name, value in arrays.items()}
        if tensors.keys() != weights.keys():
            raise UserError(f"The file has other weights than the checkpoint: {sorted(tensors.keys() ^ weights.keys())[:5]}.")
        compare([[value.numpy() for value in weights.values()]], [[tensors[name] for name in weights]], 0.0)
        with torch.no_grad():
            for value in self.module.state_dict().values():
                if isinstance(value, torch.Tensor):
                    value.fill_(float("nan") if value.is_floating_point() else 0)
        prefix = f"{part}." if part else ""
        put = {f"{prefix}{name}": torch.from_numpy(value) for name, value in tensors.items()}
        self.module.load_state_dict(put, strict=False)  # what is no tensor (an extra state) was left where it is

    def describe(self, difference: Difference) -> dict[str, Any]:
        """Returns what is known after the check."""
        if self.samples is None:
            return {"inputs": None, "outputs": None, "check": None}
        return {
            **description.of_tensors(self.samples, self.size, self.wanted),
            "check": description.of_check(self.samples, self.batches, self.to, difference),
        }


def _settle(module: LightningModule, capture: Capture) -> None:
    """Loads the evaluated weights into the module, on the CPU, in fp32, in torch's usual memory order."""
    module.load_state_dict(capture.weights)
    nn.Module.to(module, memory_format=torch.contiguous_format)
    module.cpu().float().eval()


def export(
    trainer: TypedTrainer,
    model: LightningModule,
    datamodule: LightningDataModule | None = None,
    to: Format | None = None,
    ckpt_path: str | Path | None = None,
    out: Path | None = None,
    batch_size: int | None = None,
    weights_only: bool | None = None,
) -> Path:
    """Exports the weights that an evaluation uses: a file that is loaded without this package, and was checked.

    Args:
        trainer: the Trainer of the run.
        model: the model of the run.
        datamodule: its data, whose validation set the file is checked on.
        to: safetensors (the weights), onnx or torch-export (the network), or checkpoint (all that a run goes on from, as
            one file, where a sharded run has left a folder).
        ckpt_path: best (the default of a run), last, or the path of a checkpoint.
        out: the folder that gets the file; by default export-FORMAT in the run's folder.
        batch_size: the network takes batches of so many samples; None: of any number.
        weights_only: as in torch.load.
    """
    target = Path(out or Path(trainer.default_root_dir) / f"export-{to}").absolute()
    form = exportable(to, batch_size, target)
    if trainer.world_size > 1:
        raise UserError("export takes one process. HINT: start it with plain Python, with trainer.devices=1.")
    checkpoint = Path(ckpt_path) if ckpt_path else None
    if form == "checkpoint":
        return as_one_file(trainer, checkpoint, target)
    capture, of = captured(trainer, model, datamodule, ckpt_path, weights_only)
    if form != "safetensors" and not has_forward(model):
        raise UserError(
            f"{type(model).__name__} has no forward, which is what --to {form} exports. HINT: write one; --to safetensors "
            "exports the weights alone."
        )
    made = Export(model, capture, of, form, batch_size)
    part, _ = named_weights(model) if form == "safetensors" else ("", {})
    of_data = datamodule.description() if isinstance(datamodule, SelfDealing) else {"classes": None, "images": None}
    about = {"format": form, "file": FILES[form], **description.origin(checkpoint), **of_data}
    if form == "safetensors":
        about |= {"part": part or None, "tied": shared_names(model, part)}
    with staging(target) as folder:
        difference = made.write(folder / FILES[form], about)
        lines = snippet(form, made.samples.names if made.samples else ["batch"])
        files = description.of_files(folder)
        description.copy_config(trainer, folder)
        about |= {"files": files, **made.describe(difference), "load": lines, "versions": description.of_versions(form)}
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    _say(target / FILES[form], about, lines)
    return target / FILES[form]


def _say(file: Path, about: dict[str, Any], lines: list[str]) -> None:
    size = sum(entry["bytes"] for entry in about["files"].values()) / 1e6
    log.info("%-11s %s (%.1f MB), and beside it %s and config.yaml", "exported", file, size, ABOUT)
    for entry in about["inputs"] or ():
        images = about["images"]
        normalised = f", normalised: mean {images['mean']}, std {images['std']} of pixels in 0 .. 1" if images else ""
        shape = ", ".join(map(str, entry["shape"]))
        log.info("%-11s %s: %s (%s)%s", "takes", entry["name"], entry["dtype"], shape, normalised)
    if check := about["check"]:
        largest, share = check["largest_difference"], check["share_of_largest_output"]
        same = (
            "are the same to the last bit" if not largest else f"differ by {largest:.1e} at most ({share:.1e} of the largest)"
        )
        sizes = " and ".join(map(str, check["batch_sizes"]))
        log.info("%-11s in a fresh process: %d samples of %s", "checked", check["samples"], check["of"])
        log.info("%-11s in batches of %s: outputs %s; tolerated: %.0e", "", sizes, same, check["tolerated_share"])
    for at, line in enumerate([f"cd {shlex.quote(str(file.parent))}; python", *lines]):
        log.info("%-11s %s", "" if at else "to load it", line)
