"""Exports an evaluation's weights and batches to a folder that others can use."""

import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.func import functional_call

from project.data.self_dealing import SelfDealing
from project.errors import FaultError, UserError
from project.export import description, formats
from project.export.capture import Capture, Samples, captured, pieces, samples
from project.export.check import TOLERANCE, Difference, Outputs, compare, loaded, outputs
from project.export.folder import ABOUT, refuse_strangers, staging
from project.export.formats import FILES, Format
from project.export.plain import as_one_file
from project.typed import TypedTrainer

log = logging.getLogger(__name__)

SETTINGS: dict[str, object] = {
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
    formats.require(to)
    if target is not None:
        refuse_strangers(target)
    return to


class Export:
    """A module as it was evaluated, and the way to export it."""

    def __init__(self, module: LightningModule, capture: Capture, of: str, to: Format, batch_size: int | None) -> None:
        self.module, self.to, self.size = module, to, batch_size
        module.load_state_dict(capture.weights)
        nn.Module.to(module, memory_format=torch.contiguous_format)
        module.cpu().float().eval()
        self.samples: Samples | None = None
        self.wanted: Outputs = []
        try:
            self.samples = samples(module, capture.batches, of)
            self.batches = pieces(self.samples.batches, batch_size)
            self.wanted = self._called(module)
        except UserError as error:
            if to != "safetensors":
                raise
            self.samples, self.batches = None, []
            log.warning("Only the weights are compared, and no outputs: %s", str(error).partition(" HINT:")[0])

    def _called(self, network: Callable[..., object]) -> Outputs:
        """Returns the outputs of the checkpoint's network for the batches."""
        assert self.samples is not None
        try:
            with formats.silence():
                results = outputs(network, self.batches)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{type(self.module).__name__}.forward can't take {', '.join(self.samples.names)} of {self.samples.origin}: "
                f"{formats.brief(error)} HINT: give the module an example_input_array."
            ) from error
        if any(value.isnan().any() for batch in results for value in batch if value.is_floating_point()):
            raise FaultError("The checkpoint's outputs are not numbers (NaN): there is nothing to compare an export with.")
        return results

    def write(self, file: Path, about: description.About) -> Difference:
        """Writes the file, and compares its outputs in a fresh process; raises a UserError if they differ."""
        if self.to == "safetensors":
            formats.write_weights(self.module, file, about)
            weights = self._checked_weights(cast(dict[str, Tensor], loaded(self.to, file)))

            def network(*batch: Tensor) -> object:
                return functional_call(self.module, weights, batch, tie_weights=False)

            return compare(self.wanted, self._called(network) if self.samples else [], TOLERANCE[self.to])
        assert self.samples is not None
        program = formats.trace(self.module, self.samples, self.size)
        if self.to == "onnx":
            formats.write_onnx(program, file, self.samples.names)
        else:
            formats.write_traced(program, file)
        return compare(self.wanted, cast(Outputs, loaded(self.to, file, self.batches)), TOLERANCE[self.to])

    def _checked_weights(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights from a file by their names in the module; raises a UserError if they are not the module's."""
        part, weights = formats.named_weights(self.module)
        if tensors.keys() != weights.keys():
            raise FaultError(f"The file has other weights than the checkpoint: {sorted(tensors.keys() ^ weights.keys())[:5]}.")
        compare([[*weights.values()]], [[tensors[name] for name in weights]], 0.0)
        return {f"{part}.{name}" if part else name: value for name, value in tensors.items()}


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
        to: safetensors (the weights), onnx or torch-export (the network), or checkpoint (all that a run resumes from, as
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
    if form != "safetensors" and not is_overridden("forward", model, LightningModule):
        raise UserError(
            f"{type(model).__name__} has no forward, which is what --to {form} exports. HINT: write one; --to safetensors "
            "exports the weights alone."
        )
    made = Export(model, capture, of, form, batch_size)
    of_data = datamodule.description() if isinstance(datamodule, SelfDealing) else {"classes": None, "images": None}
    about: description.About = {"format": form, "file": FILES[form], **description.origin(checkpoint), **of_data}
    if form == "safetensors":
        part, _ = formats.named_weights(model)
        about |= {"part": part or None, "tied": formats.shared_names(model, part)}
    with staging(target) as folder:
        difference = made.write(folder / FILES[form], about)
        about |= {"inputs": None, "outputs": None, "check": None, "load": formats.snippet(form, ["batch"])}
        if made.samples:
            about |= description.of_tensors(made.samples, batch_size, made.wanted)
            about["check"] = description.of_check(made.samples, made.batches, form, difference)
            about["load"] = formats.snippet(form, made.samples.names)
        description.finish(folder, trainer, about, formats.LIBRARIES[form])
    _say(target / FILES[form], about)
    return target / FILES[form]


def _say(file: Path, about: description.About) -> None:
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
    for at, line in enumerate([f"cd {shlex.quote(str(file.parent))}; python", *about["load"]]):
        log.info("%-11s %s", "" if at else "to load it", line)
