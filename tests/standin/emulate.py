"""Computes on the CPU what the stand-in's kernels leave undone, in the memory that both share; again at each replay of a graph.

A mode of PyTorch's dispatcher sees every operator on a GPU. It runs the operator's CUDA code, which allocates, launches and is
refused in a capture as on a GPU, and then the CPU's operator on tensors over the same memory.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
DRIVER = ctypes.CDLL(None)
DRIVER.standin_launch.argtypes = [ctypes.c_void_p]
DRIVER.standin_replay.argtypes = [ctypes.c_long, ctypes.c_long]
for _counter in (DRIVER.standin_launches, DRIVER.standin_recordings, DRIVER.standin_contexts):
    _counter.restype = ctypes.c_long

# Their CUDA code does all that there is to do.
NO_KERNEL = {
    *("resize_", "set_", "record_stream", "_local_scalar_dense", "detach", "lift_fresh", "is_pinned", "_pin_memory"),
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_resize_output_", "is_same_size"),
    *("_has_same_storage_numel", "alias", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"),
}
# Their CUDA code goes through a library sample by sample, or reads sizes that a kernel has not computed: it is not run.
ON_CPU_ALONE = {"convolution", "convolution_backward", "_convolution", "conv1d", "conv2d", "conv3d", "cudnn_convolution"}
MASKED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}

Thunk = Callable[[], Any]
capturing: list[Thunk] | None = None
"""What a replay of the graph that is being captured has to do."""
replay_draws = (0, 0)
"""Seed and offset of the generator of random numbers when a graph's replay began."""


class Operator:
    """What is known of an operator by its schema."""

    def __init__(self, overload: Any) -> None:
        space, self.name = overload._schema.name.split("::")
        self.overload = overload
        self.communicates = space in ("c10d", "_c10d_functional")
        self.no_kernel = space == "profiler" or self.name in NO_KERNEL or torch.Tag.inplace_view in overload.tags
        self.writes = any(argument.alias_info and argument.alias_info.is_write for argument in overload._schema.arguments)
        self.views = not self.writes and any(result.alias_info for result in overload._schema.returns)
        self.draws = torch.Tag.nondeterministic_seeded in overload.tags
        self.masked = self.name in MASKED
        waits = torch.Tag.dynamic_output_shape in overload.tags and not self.masked
        self.waits = waits
        self.alone = waits or self.name in ON_CPU_ALONE or "linalg" in self.name
        self.new_results = not self.writes or any(result.alias_info is None for result in overload._schema.returns)
        self.widens = False
        self.increments: dict[Any, int] = {}

    def compute(self, args: Any, kwargs: Any) -> Any:
        """The CPU's result; in float where the CPU has no kernel for a smaller format."""
        if not self.widens:
            try:
                return self.overload(*args, **kwargs)
            except (RuntimeError, NotImplementedError) as error:
                if self.writes or "not implemented for" not in str(error):
                    raise RuntimeError(f"The stand-in can't compute {self.overload} on the CPU: {error}") from error
                self.widens = True
        return self.overload(*mapped(widened, args), **{name: mapped(widened, value) for name, value in kwargs.items()})


def mapped(call: Callable[[Any], Any], value: Any) -> Any:
    """The value with `call` applied to what lies in its lists and tuples."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)([mapped(call, item) for item in value])
    return call(value)


def widened(value: Any) -> Any:
    small = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if small else value


_aliases: dict[Any, torch.Tensor] = {}
_MOST_ALIASES = 20_000


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of one on a GPU."""
    if not tensor.is_cuda or tensor.layout != torch.strided:
        return tensor
    size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
    flags = (tensor.is_conj(), tensor.is_neg())
    key = (tensor.data_ptr(), dtype, size, stride, flags)
    made = _aliases.get(key)
    if made is not None:
        return made
    if tensor.numel() == 0:
        return torch.empty_strided(size, stride, dtype=dtype)
    extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), CPU, extent * dtype.itemsize)
    made = torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)
    if flags[0]:
        made = made.conj()
    if flags[1]:
        made = torch._neg_view(made)
    if len(_aliases) > _MOST_ALIASES:
        _aliases.clear()
    _aliases[key] = made
    return made


def lowered(value: Any) -> Any:
    """An operator's argument, as the CPU's operator takes it."""
    if isinstance(value, torch.Tensor):
        return alias(value)
    if isinstance(value, torch.device):
        return CPU
    if isinstance(value, torch.Generator):
        return None
    return value


def on_gpu(values: Iterator[Any] | Any) -> torch.device | None:
    """The GPU that arguments name first, or lie on."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                return value.device
        elif isinstance(value, torch.device):
            if value.type == "cuda":
                return value
        elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
            device = on_gpu(value)
            if device is not None:
                return device
    return None


def captures() -> bool:
    return capturing is not None and torch.cuda.is_current_stream_capturing()


def drawn(seed: int, offset: int, work: Thunk) -> Any:
    """Work with random numbers that follow from the GPU's generator alone; the CPU's is left as it was."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(hash((seed, offset)) & (1 << 62) - 1)
    try:
        return work()
    finally:
        torch.default_generator.set_state(state)


class Emulation(TorchDispatchMode):
    """Below all other modes, in every thread."""

    operators: dict[Any, Operator] = {}  # noqa: RUF012 - one for all threads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = self.operators.get(func)
        if operator is None:
            operator = self.operators[func] = Operator(func)
        if operator.no_kernel or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)
        for kind in types:
            if kind is not torch.Tensor and kind is not torch.nn.Parameter and _dispatches(kind):
                return func(*args, **kwargs) if kind.__name__ == "FakeTensor" else NotImplemented
        if operator.communicates:
            return communicate(func, args, kwargs)
        device = on_gpu(args) or on_gpu(kwargs.values())
        if device is None:
            return func(*args, **kwargs)
        return emulate(operator, device, args, kwargs)


def _dispatches(kind: type) -> bool:
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def communicate(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective, which the driver does; what it records for a graph is done in its place among the kernels."""
    first = DRIVER.standin_recordings()
    result = func(*args, **kwargs)
    last = DRIVER.standin_recordings()
    if capturing is not None and last > first:
        capturing.append(lambda: DRIVER.standin_replay(first, last))
    return result


def emulate(operator: Operator, device: torch.device, args: Any, kwargs: Any) -> Any:
    if operator.alone or (operator.masked and any(_is_mask(index) for index in args[1])):
        return emulate_alone(operator, device, args, kwargs)
    offset = 0
    recording = captures()
    if operator.draws and not recording:
        generator = _generator(device, args, kwargs)
        offset = generator.get_offset()
    result = operator.overload(*args, **kwargs)
    if operator.views and _is_view(result, args):
        return result
    cpu_args = [mapped(lowered, value) for value in args]
    cpu_kwargs = {name: mapped(lowered, value) for name, value in kwargs.items()}
    places = [alias(leaf) for leaf in _tensors(result)] if operator.new_results else []

    def work() -> Any:
        computed = operator.compute(cpu_args, cpu_kwargs)
        for place, value in zip(places, _tensors(computed), strict=False):
            if value.numel() and place.numel() and place.data_ptr() != value.data_ptr():  # batch norm's may be empty
                place.copy_(value)
        return computed

    if operator.draws:
        size = (tuple(leaf.size() for leaf in _tensors(result)),)
        if recording:
            begun = capture_offset(operator.increments.get(size, 4))
            draw = work
            work = lambda: drawn(replay_draws[0], replay_draws[1] + begun, draw)  # noqa: E731
        else:
            operator.increments[size] = generator.get_offset() - offset
            if not DRIVER.standin_hung():
                drawn(generator.initial_seed(), offset, work)
            return result
    if recording:
        assert capturing is not None
        capturing.append(work)
        return result
    if DRIVER.standin_hung():
        return result
    computed = work()
    return computed if isinstance(result, (bool, int, float)) else result


_captured_draws = 0


def capture_offset(increment: int) -> int:
    """Where in the graph's random numbers an operator begins."""
    global _captured_draws
    _captured_draws += increment
    return _captured_draws - increment


def _generator(device: torch.device, args: Any, kwargs: Any) -> torch.Generator:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def emulate_alone(operator: Operator, device: torch.device, args: Any, kwargs: Any) -> Any:
    """An operator whose CUDA code is not run: the CPU says what its results look like."""
    if operator.waits or operator.masked:
        torch.ops.aten._local_scalar_dense(torch.empty((), device=device))  # the host waits for the number of values
    cpu_args = [mapped(lowered, value) for value in args]
    cpu_kwargs = {name: mapped(lowered, value) for name, value in kwargs.items()}
    DRIVER.standin_launch(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
    computed = operator.compute(cpu_args, cpu_kwargs)
    if operator.writes:
        result, places = args[0], []
    else:
        result = mapped(lambda value: _like(value, device), computed)
        places = [alias(leaf) for leaf in _tensors(result)]

    def copy(values: Any) -> None:
        for place, value in zip(places, _tensors(values), strict=True):
            place.copy_(value)

    copy(computed)
    if captures():
        assert capturing is not None
        capturing.append(lambda: copy(operator.compute(cpu_args, cpu_kwargs)))
    return result


def _like(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_view(result: Any, args: Any) -> bool:
    """Whether all results lie in the memory of an argument; `reshape` and the like may copy."""
    memory = {leaf.untyped_storage().data_ptr() for leaf in _tensors(args)}
    return all(leaf.untyped_storage().data_ptr() in memory for leaf in _tensors(result))


def _emulate_graphs() -> None:
    graph = torch.cuda.CUDAGraph
    begin, end, replay, reset = graph.capture_begin, graph.capture_end, graph.replay, graph.reset

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        global capturing, _captured_draws
        begin(self, *args, **kwargs)
        capturing, _captured_draws = [], 0

    def capture_end(self: Any) -> None:
        global capturing
        self.standin_thunks, capturing = capturing, None
        end(self)

    def replay_thunks(self: Any) -> None:
        global replay_draws
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        replay_draws = (generator.initial_seed(), generator.get_offset())
        replay(self)
        if not DRIVER.standin_hung():
            for thunk in self.standin_thunks:
                thunk()

    def forget_thunks(self: Any) -> None:
        self.standin_thunks = []
        reset(self)

    graph.capture_begin, graph.capture_end, graph.replay, graph.reset = capture_begin, capture_end, replay_thunks, forget_thunks  # type: ignore[method-assign]


def _emulate_in_threads() -> None:
    start = threading.Thread.start

    def start_emulated(self: threading.Thread) -> None:
        run = self.run

        def run_emulated() -> None:
            with Emulation():
                run()

        self.run = run_emulated  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_emulated  # type: ignore[method-assign]


def _emulate_printing() -> None:
    """PyTorch switches all modes off while it prints a tensor."""
    text = torch._tensor_str._str

    def text_from_cpu(self: torch.Tensor, **contents: Any) -> str:
        if not self.is_cuda:
            return text(self, **contents)
        return f"{text(self.detach().cpu(), **contents)[:-1]}, device='{self.device}')"

    torch._tensor_str._str = text_from_cpu


def install() -> None:
    """Lets every operator on a GPU be computed by the CPU, from now on."""
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("STANDIN_EMULATE") == "0":
        return
    _emulate_graphs()
    _emulate_in_threads()
    _emulate_printing()
    Emulation().__enter__()
