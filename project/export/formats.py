"""The formats: what each needs, how its file is written, and how it is loaded without this package."""

import io
import json
import logging
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.export import Dim, ExportedProgram

from project.errors import UserError
from project.export.capture import Inputs, Samples

Format = Literal["safetensors", "onnx", "torch-export", "checkpoint"]

FILES: dict[str, str] = {
    "safetensors": "model.safetensors",
    "onnx": "model.onnx",
    "torch-export": "model.pt2",
    "checkpoint": "step-N.ckpt",  # all that a run resumes from (export/plain.py)
}
LIBRARIES: dict[str, tuple[str, ...]] = {
    "safetensors": ("safetensors",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "torch-export": (),
    "checkpoint": (),
}


def require(form: Format) -> None:
    """Raises a UserError that names a library that a format needs and that is not installed."""
    for name in LIBRARIES[form]:
        try:
            import_module(name)
        except ImportError as error:
            raise UserError(f"--to {form} needs {name}. HINT: pip install 'samerun[export]'") from error


def named_weights(module: LightningModule) -> tuple[str, dict[str, Tensor]]:
    """Returns the module's only part with weights ('' for several), and the weights by their names in it."""
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    parts = {name.partition(".")[0] for name in state}
    part = next(iter(parts)) if len(parts) == 1 and all("." in name for name in state) else ""
    # Tensors that two names share are written twice: then `load_state_dict` finds each of its names.
    return part, {name.removeprefix(f"{part}."): value.detach().contiguous().clone() for name, value in state.items()}


def shared_names(module: LightningModule, part: str) -> list[list[str]]:
    """Returns the names of each tensor that has several, as tied weights have."""
    places: dict[tuple[object, ...], list[str]] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor) and value.numel():
            place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            places.setdefault(place, []).append(name.removeprefix(f"{part}."))
    return [names for names in places.values() if len(names) > 1]


def write_weights(module: LightningModule, path: Path, about: Mapping[str, object]) -> None:
    """Writes a safetensors file, whose metadata are strings."""
    from safetensors.torch import save

    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
    # Through memory, here and below: on a full disk these writers fail with errors of their own, and torch's ends the process.
    path.write_bytes(save(named_weights(module)[1], {"format": "pt", **metadata}))


@contextmanager
def silence() -> Iterator[None]:
    """Suppresses prints, warnings and log lines of the exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def trace(module: LightningModule, samples: Samples, size: int | None) -> ExportedProgram:
    """Returns the module's `forward` as a graph, for any number of samples or for batches of `size`."""
    # From a batch of one sample, the tracer would conclude that there is always one.
    count = size or max(len(samples.batches[0][0]), 2)
    example = tuple(torch.cat([part] * -(-count // len(part)))[:count] for part in samples.batches[0])
    try:
        return _traced(module, example, None if size else _free(samples))
    except Exception as error:  # whatever the tracer makes of somebody's code
        problem, fix = f"can't be traced: {brief(error)}", "what it does must not depend on the values in tensors"
        fix += " (torch.where instead of if)"
        with suppress(Exception):
            if size is None:
                _traced(module, example, None)
                problem = f"does not take any number of samples: {brief(error)}"
                fix = "--batch_size N exports it for batches of N"
    raise UserError(f"{type(module).__name__}.forward {problem} HINT: {fix}; --to safetensors exports the weights alone.")


def _free(samples: Samples) -> tuple[dict[int, object], ...]:
    """Returns each input's dimensions that may have another size: the samples, and what differs between batches."""
    batch = Dim("batch")
    dimensions: list[dict[int, object]] = []
    for parts in zip(*samples.batches, strict=True):
        sizes = [{*lengths} for lengths in zip(*(part.shape for part in parts), strict=True)]
        dimensions.append({0: batch, **{at: Dim.DYNAMIC for at in range(1, len(sizes)) if len(sizes[at]) > 1}})
    return tuple(dimensions)


def _traced(module: LightningModule, example: Inputs, free: tuple[dict[int, object], ...] | None) -> ExportedProgram:
    with silence(), torch.no_grad():
        return torch.export.export(module, example, dynamic_shapes=free, strict=False)


def brief(error: BaseException) -> str:
    """Returns an exporter's error message without its page of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if not line.endswith(":") and not set(line) <= {*"=-"}), type(error).__name__)
    return textwrap.shorten(reason, 240, placeholder=" ...").rstrip(".:") + "."


def write_traced(program: ExportedProgram, path: Path) -> None:
    """Writes torch.export's own file."""
    content = io.BytesIO()
    with silence():
        torch.export.save(program, content)
    path.write_bytes(content.getbuffer())


def write_onnx(program: ExportedProgram, path: Path, names: list[str]) -> None:
    """Writes an ONNX file; of more than 2 GB, with its weights in a second one."""
    try:
        with silence(), torch.no_grad():
            made = torch.onnx.export(program, input_names=names, dynamo=True, verbose=False)
    except Exception as error:  # an operation that ONNX does not have, say
        raise UserError(
            f"The network can't be written as ONNX: {brief(error)} HINT: --to torch-export and --to safetensors may do."
        ) from error
    assert made is not None
    with silence():
        made.save(path)


_SNIPPETS: dict[str, str] = {
    "safetensors": """\
        from safetensors.torch import load_file
        network.load_state_dict(load_file("model.safetensors"))
        output = network.eval()({arguments})""",
    "onnx": """\
        import onnxruntime
        session = onnxruntime.InferenceSession("model.onnx")
        output = session.run(None, {{{named}}})""",
    "torch-export": """\
        import torch
        network = torch.export.load("model.pt2").module()
        output = network({arguments})""",
}


def snippet(form: Format, names: list[str]) -> list[str]:
    """Returns three lines that load the file; in ONNX's, the inputs are numpy's arrays."""
    named = ", ".join(f'"{name}": {name}' for name in names)
    return textwrap.dedent(_SNIPPETS[form]).format(arguments=", ".join(names), named=named).splitlines()
