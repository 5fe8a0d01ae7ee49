"""The outputs of a network's modules in one forward pass, as checksums: they name the first in which two runs differ."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn

from project.step.batch_norm_layers import compiled_modules
from project.watch.checksums import Checksums, plain, together

_MOST = 2000  # calls: a network that loops over its layers has many


def tensors_in(output: object) -> Iterator[Tensor]:
    """Yields the tensors in whatever a module returns, in their order."""
    if isinstance(output, Tensor) and plain(output):
        yield output
    if is_dataclass(output) and not isinstance(output, (type, Mapping)):
        output = {field.name: vars(output).get(field.name) for field in fields(output)}
    if isinstance(output, (Mapping, list, tuple)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_in(value)


class ModuleOutputs:
    """Listens to a module's submodules from when it is made until `end`.

    Nothing is recorded of what torch.compile has translated, which must not find hooks, nor of torch.jit's modules.
    """

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[tuple[str, Tensor]] = []
        translated = compiled_modules(module)
        if "training_step" in vars(module):  # torch.compile of the whole leaves another one there
            translated |= set(module.modules())
        self._hooks = [
            part.register_forward_hook(self._listener(f"{name} ({type(part).__name__})"))
            for name, part in module.named_modules()
            if part is not module and part not in translated and not isinstance(part, torch.jit.ScriptModule)
        ]

    def _listener(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def listen(part: nn.Module, args: object, output: object) -> None:
            tensors = [] if torch.compiler.is_compiling() or len(self.calls) >= _MOST else list(tensors_in(output))
            if tensors and not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph's change each time
                # One by one: they may lie on several devices.
                each = [together(Checksums([tensor])()).to(tensors[0].device) for tensor in tensors]
                self.calls.append((name, together(torch.stack(each))))

        return listen

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
