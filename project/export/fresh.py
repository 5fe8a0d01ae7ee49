"""Loads an exported file and saves its outputs: a process of its own, in which there is no `project`.

The source of this file is what runs: python -c SOURCE FORMAT FILE INPUTS OUTPUTS
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

Arrays = list[Any]


def flattened(value: Any) -> Iterator[Any]:
    """Yields the tensors that a network returned, in lists, tuples and dicts, in their order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flattened(item)
    elif value is not None:
        yield value


def _onnx(file: str, batches: list[Arrays]) -> list[Arrays]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]
    return [list(session.run(None, dict(zip(names, batch, strict=True)))) for batch in batches]


def _torch_export(file: str, batches: list[Arrays]) -> list[Arrays]:
    import torch

    network = torch.export.load(file).module()
    with torch.no_grad():
        results = [network(*map(torch.from_numpy, batch)) for batch in batches]
    return [[torch.as_tensor(leaf).numpy() for leaf in flattened(result)] for result in results]


def main(form: str, file: str, inputs: str, outputs: str) -> None:
    """Computes the outputs, or reads the weights if there are only those; writes them into a file of numpy's."""
    results: dict[str, Any]
    if form == "safetensors":
        from safetensors.torch import load_file

        results = {f"tensor {name}": value.numpy() for name, value in load_file(file).items()}
    else:
        given = np.load(inputs)
        count = 1 + max(int(name.split()[0]) for name in given)
        batches = [[given[name] for name in given if name.split()[0] == str(at)] for at in range(count)]
        batch_outputs = (_onnx if form == "onnx" else _torch_export)(file, batches)
        results = {f"{at} {number}": leaf for at, values in enumerate(batch_outputs) for number, leaf in enumerate(values)}
    np.savez(outputs, **results)


if __name__ == "__main__":
    sys.modules["project"] = None  # type: ignore[assignment]  # whoever asks for it gets an ImportError
    main(*sys.argv[1:])
