"""Loads an exported file and saves its outputs, in a process of its own: python -c SOURCE FORMAT FILE INPUTS OUTPUTS"""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def flattened(value: object) -> Iterator[object]:
    """Yields the tensors that a network returned, in lists, tuples and dicts, in their order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flattened(item)
    elif value is not None:
        yield value


def _onnx(file: str) -> Callable[..., object]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]

    def network(*batch: Tensor) -> object:
        return session.run(None, {name: part.numpy() for name, part in zip(names, batch, strict=True)})

    return network


def main(form: str, file: str, inputs: str, outputs: str) -> None:
    """Saves the outputs of each batch, or the weights if there are only those."""
    if form == "safetensors":
        from safetensors.torch import load_file

        torch.save(load_file(file), outputs)
        return
    network = _onnx(file) if form == "onnx" else torch.export.load(file).module()
    with torch.no_grad():
        batches = torch.load(inputs, weights_only=True)
        torch.save([[torch.as_tensor(leaf) for leaf in flattened(network(*batch))] for batch in batches], outputs)


if __name__ == "__main__":
    sys.modules["project"] = None  # type: ignore[assignment]  # whoever asks for it gets an ImportError
    main(*sys.argv[1:])
