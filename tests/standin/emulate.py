"""Computes on the CPU what the stand-in's kernels leave undone, in the memory that both share; again at each replay of a graph.

A mode of PyTorch's dispatcher sees every operator on a GPU. It runs the operator's CUDA code, which allocates, launches and is
refused in a capture as on a GPU, and then the CPU's operator on tensors over the same memory.
"""

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tag, Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
DRIVER = ctypes.CDLL(None)
DRIVER.standin_launch.argtypes = [ctypes.c_void_p]
DRIVER.standin_replay.argtypes = [ctypes.c_long, ctypes.c_long]
for _count in (DRIVER.standin_launches, DRIVER.standin_graph_launches, DRIVER.standin_recordings, DRIVER.standin_contexts):
    _count.restype = ctypes.c_long

# Their CUDA code does all that there is to do.
NO_KERNEL = {
    *("resize_", "set_", "record_stream", "_local_scalar_dense", "detach", "lift_fresh", "is_pinned", "_pin_memory"),
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_resize_output_", "is_same_size"),
    "_has_same_storage_numel",
}
# Their CUDA code calls a library, which would answer: it is not run. Nor is that of operators that read how large a result is.
ON_CPU_ALONE = re.compile("_?convolution|conv[123]d|.*linalg|.*fft|.*cholesky")
TAKE_MASKS = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
SMALL = (torch.float16, torch.bfloat16)
NARROW = ("not implemented for", "expected scalar type")  # what the CPU says that computes a smaller type otherwise, or not
PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format}
PRETENDED_DEVICE = torch.ops.prim.device.default
FAKE = torch._C._TorchDispatchModeKey.FAKE
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
mode_of = torch._C._get_dispatch_mode


class Operator:
    """What an operator's schema says of it, and how the CPU computes it."""

    def __init__(self, overload: Any) -> None:
        schema = overload._schema
        space, name = schema.name.split("::")
        returned = [result.alias_info for result in schema.returns]
        self.overload = overload
        self.no_kernel = space == "profiler" or name in NO_KERNEL or Tag.inplace_view in overload.tags
        self.communicates = space in ("c10d", "_c10d_functional")
        self.copies = space == "_c10d_functional" and not name.endswith("_")
        self.writes = any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments)
        self.may_be_view = (
            any(returned) and not self.writes
        )  # `reshape` and the like may copy; all that are not made of others view
        if self.may_be_view and not has_kernel(overload.name(), "CompositeImplicitAutograd"):
            self.no_kernel = True
        self.makes_tensors = not self.writes or not all(returned)
        self.draws = Tag.nondeterministic_seeded in overload.tags
        self.takes_masks = name in TAKE_MASKS
        self.waits = Tag.dynamic_output_shape in overload.tags and not self.takes_masks
        self.alone = self.waits or ON_CPU_ALONE.match(name) is not None
        self.widens = False
        self.increments: dict[Any, int] = {}  # of a generator's offset, by the size of the result

    def compute(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The CPU's result: in float32 where the CPU has no kernel for a smaller type."""
        if not self.widens:
            try:
                return self.overload(*args, **kwargs)
            except (RuntimeError, NotImplementedError) as error:
                if self.writes or not any(phrase in str(error) for phrase in NARROW):
                    first = str(error).partition("\n")[0]
                    raise RuntimeError(f"The stand-in can't compute {self.overload} on the CPU: {first}") from error
                self.widens = True
        return self.overload(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()})


def widened(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [widened(item) for item in value]
    return value.float() if isinstance(value, Tensor) and value.dtype in SMALL else value


def lowered(value: Any) -> Any:
    """An argument as the CPU's operator takes it."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return alias(value)
    if type(value) in (list, tuple):
        return [lowered(item) for item in value]
    if isinstance(value, torch.device):
        return CPU
    return None if isinstance(value, torch.Generator) else value


_aliases: dict[Any, Tensor] = {}
_MOST_ALIASES = 20_000


@torch.inference_mode(False)
def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of one on a GPU; what lies on the CPU as it is. It outlives the mode that it is made in."""
    if not tensor.is_cuda or tensor.layout != torch.strided:
        return tensor
    size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
    key = (tensor.data_ptr(), size, stride, dtype, tensor.is_conj(), tensor.is_neg())
    if key in _aliases:
        return _aliases[key]
    if tensor.numel() == 0:
        return torch.empty_strided(size, stride, dtype=dtype)
    extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), CPU, extent * dtype.itemsize)
    made = torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)
    made = made.conj() if tensor.is_conj() else made
    made = torch._neg_view(made) if tensor.is_neg() else made
    if len(_aliases) > _MOST_ALIASES:
        _aliases.clear()
    _aliases[key] = made
    return made


def tensors(value: Any) -> list[Tensor]:
    """Those in a value and in its lists."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, (list, tuple)) else []


def gpu_of(values: Iterable[Any]) -> torch.device | None:
    """The GPU that arguments lie on, or name."""
    for value in values:
        if type(value) in PLAIN:
            continue
        if isinstance(value, Tensor):
            device = value.device if value.is_cuda else None
        elif type(value) in (list, tuple):
            device = gpu_of(value)
        else:
            device = value if isinstance(value, torch.device) and value.type == "cuda" else None
        if device is not None:
            return device
    return None


class Recording:
    """What the replays of a graph that is being captured have to do."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []
        self.offset = 0  # of its next random number, from where a replay begins


_recording: Recording | None = None
_replay_begins = (0, 0)  # seed and offset of the generator of random numbers, at a replay


def recording() -> Recording | None:
    """The graph that the current stream is captured into."""
    return _recording if _recording is not None and torch.cuda.is_current_stream_capturing() else None


class Emulation(TorchDispatchMode):
    """Lies below all other modes, in every thread."""

    operators: dict[Any, Operator] = {}  # noqa: RUF012

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is never compiled, and the wrapper that says so takes a third of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = self.operators.get(func)
        if operator is None:
            operator = self.operators[func] = Operator(func)
        fake = mode_of(FAKE) is not None
        for kind in types:
            if kind not in (Tensor, Parameter) and kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
                if kind.__name__ != "FakeTensor" or func is PRETENDED_DEVICE:
                    return NotImplemented  # a subclass, whose own operators come here
                fake = True
        if fake or operator.no_kernel:
            return func(*args, **kwargs)
        if operator.communicates:
            if operator.copies:  # by a kernel, where there are gaps between the values
                with self:
                    args = [value.contiguous() if isinstance(value, Tensor) else value for value in args]
            return communicate(func, args, kwargs)
        device = gpu_of(args) or gpu_of(kwargs.values())
        if device is None:
            return func(*args, **kwargs)
        if operator.alone or (operator.takes_masks and any(is_mask(index) for index in args[1])):
            return emulate_alone(operator, device, args, kwargs)
        if operator.draws:
            return emulate_draw(operator, device, args, kwargs)
        return emulate(operator, args, kwargs)


def emulate(operator: Operator, args: Any, kwargs: Any, draw: Callable[[Callable[[], Any], Any], Any] | None = None) -> Any:
    """An operator's result; `draw` says how the CPU comes to the random numbers of a GPU."""
    result = operator.overload(*args, **kwargs)
    if operator.may_be_view and is_view(result, args):
        return result
    cpu_args, cpu_kwargs = lowered(args), {name: lowered(value) for name, value in kwargs.items()}
    places = [alias(tensor) for tensor in tensors(result)] if operator.makes_tensors else []

    def work() -> Any:
        computed = operator.compute(cpu_args, cpu_kwargs)
        for place, value in zip(places, tensors(computed) if places else (), strict=False):
            if place.data_ptr() != value.data_ptr() and place.numel() and value.numel():  # batch norm's may be empty
                place.copy_(value)
        return computed

    finish = work if draw is None else lambda: draw(work, result)
    graph = recording()
    if graph is not None:
        graph.work.append(finish)
    elif not DRIVER.standin_hung():
        computed = finish()
        return computed if isinstance(result, (bool, int, float)) else result
    return result


def is_view(result: Any, args: Any) -> bool:
    """Whether a result lies in the memory of the arguments: `reshape` and the like may copy."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors(args)}
    return all(tensor.untyped_storage().data_ptr() in memory for tensor in tensors(result))


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def emulate_draw(operator: Operator, device: torch.device, args: Any, kwargs: Any) -> Any:
    """Random numbers that follow from the seed and the offset of the GPU's generator, be the operator eager or replayed."""
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    generator = given[0] if given else torch.cuda.default_generators[index]
    graph = recording()
    begins = generator.get_offset() if graph is None else graph.offset

    def draw(work: Callable[[], Any], result: Any) -> Any:
        seed, offset = (generator.initial_seed(), begins) if graph is None else (_replay_begins[0], _replay_begins[1] + begins)
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(hash((seed, offset)) & (1 << 62) - 1)
        try:
            return work()
        finally:
            torch.default_generator.set_state(before)

    result = emulate(operator, args, kwargs, draw)
    size = tuple(tensor.size() for tensor in tensors(result))
    if graph is None:
        operator.increments[size] = generator.get_offset() - begins
    else:
        graph.offset += operator.increments.get(size, 4)
    return result


def emulate_alone(operator: Operator, device: torch.device, args: Any, kwargs: Any) -> Any:
    """The result of an operator whose CUDA code is not run: the CPU knows what it looks like."""
    if operator.waits or operator.takes_masks:
        torch.ops.aten._local_scalar_dense(torch.empty((), device=device))  # the host waits for the number of values
    DRIVER.standin_launch(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
    cpu_args, cpu_kwargs = lowered(args), {name: lowered(value) for name, value in kwargs.items()}
    computed = operator.compute(cpu_args, cpu_kwargs)
    if operator.writes:
        result, places = args[0], []
    else:
        result = raised(computed, device)
        places = [alias(tensor) for tensor in tensors(result)]

    def copy(values: Any) -> None:
        for place, value in zip(places, tensors(values), strict=False):
            place.copy_(value)

    graph = recording()
    if graph is not None:
        graph.work.append(lambda: copy(operator.compute(cpu_args, cpu_kwargs)))
    elif not DRIVER.standin_hung():
        copy(computed)
    return result


def raised(value: Any, device: torch.device) -> Any:
    """Memory on a GPU for a result of the CPU."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    return type(value)(raised(item, device) for item in value) if isinstance(value, (list, tuple)) else value


def communicate(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective, which the driver does; a graph does what it recorded of it, in its place among the kernels."""
    first = DRIVER.standin_recordings()
    result = func(*args, **kwargs)
    last = DRIVER.standin_recordings()
    if _recording is not None and last > first:
        _recording.work.append(lambda: DRIVER.standin_replay(first, last))
    return result


def emulate_graphs() -> None:
    graph: Any = torch.cuda.CUDAGraph
    begin, end, replay, reset = graph.capture_begin, graph.capture_end, graph.replay, graph.reset

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        global _recording
        begin(self, *args, **kwargs)
        _recording = Recording()

    def capture_end(self: Any) -> None:
        global _recording
        assert _recording is not None
        self.work, _recording = _recording.work, None
        end(self)

    def replay_work(self: Any) -> None:
        global _replay_begins
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        _replay_begins = (generator.initial_seed(), generator.get_offset())
        replay(self)
        if not DRIVER.standin_hung():
            for work in self.work:
                work()

    def reset_work(self: Any) -> None:
        self.work = []
        reset(self)

    graph.capture_begin, graph.capture_end, graph.replay, graph.reset = capture_begin, capture_end, replay_work, reset_work


def emulate_in_threads() -> None:
    thread: Any = threading.Thread
    start = thread.start

    def start_emulated(self: Any) -> None:
        run = self.run

        def run_emulated() -> None:
            with Emulation():
                run()

        self.run = run_emulated
        start(self)

    thread.start = start_emulated


def emulate_printing() -> None:
    """PyTorch switches all modes off while it prints a tensor."""
    text = torch._tensor_str._str

    def text_of_alias(self: Tensor, **contents: Any) -> str:
        if not self.is_cuda:
            return text(self, **contents)
        return f"{text(self.detach().cpu(), **contents)[:-1]}, device='{self.device}')"

    torch._tensor_str._str = text_of_alias


def install() -> None:
    """Has the CPU compute every operator on a GPU, from now on."""
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("STANDIN_EMULATE") == "0":
        return
    emulate_graphs()
    emulate_in_threads()
    emulate_printing()
    Emulation().__enter__()
