"""Builds the stand-in for a GPU: a `libcuda.so.1` that LD_PRELOAD puts before CUDA's libraries.

PyTorch's own CUDA code runs over it unchanged: the allocator, streams, events, graphs, GradScaler, fused optimisers, both
process groups of NCCL. It can't show how fast a kernel is, races between streams, cuDNN, Triton, the order of NCCL's own sums.

| variable | is |
| --- | --- |
| `STANDIN_GPUS` | how many GPUs this host has (1) |
| `STANDIN_GIB` | the memory of each (80); an allocation over it fails |
| `STANDIN_OTHERS_GIB` | what other processes hold of it (0) |
| `STANDIN_NAME` | its name, as `torch.cuda.get_device_name` gives it |
| `STANDIN_HANG` | `GPU:N`: at the N-th launch of a process on that GPU, it hangs |
| `STANDIN_NCCL` | the folder in which ranks meet (/dev/shm); hosts that share it are one cluster |
| `STANDIN_NCCL_FAIL` | `RANK:N`: the N-th collective of that rank fails |
| `STANDIN_EMULATE` | `0` leaves kernels undone: for the costs of the host alone |
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(str(find_spec("torch").origin)).parents[1]  # type: ignore[union-attr]

# What has nothing to do here, and succeeds.
_NOTHING_TO_DO = {
    *("cudaProfilerStart", "cudaProfilerStop", "cudaDeviceEnablePeerAccess", "cudaStreamUpdateCaptureDependencies"),
    *("cudaGraphDestroy", "cudaGraphExecDestroy", "cudaGraphRetainUserObject", "cudaUserObjectRelease", "cuCtxSetCurrent"),
    *("cudaFuncSetAttribute", "cudaKernelSetAttributeForDevice", "cudaMemcpyToSymbol", "__cudaRegisterVar"),
    *("__cudaRegisterFatBinaryEnd", "__cudaUnregisterFatBinary"),
    *("ncclCommFinalize", "ncclCommDestroy", "ncclCommRegister", "ncclCommDeregister", "ncclRedOpDestroy"),
}
_RUNTIME = re.compile(r"(__)?(cuda|cu[A-Z]|nccl)")
_MATHEMATICS = re.compile(r"cu(blas|dnn|fft|solver|sparse|rand|pti)")

# All that the headers of the runtime need of nvcc's own, which PyTorch does not install.
_HOST_DEFINES = """#pragma once
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __location__(place)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define CUDARTAPI
#define CUDARTAPI_CDECL
"""

_STUBS = """#include <cstdio>
#include <unistd.h>
#define SUCCEEDS(name) extern "C" int name() { return 0; }
#define LACKING(name)                                                             \\
  extern "C" int name() {                                                         \\
    static bool printed = false;                                                  \\
    if (!printed) fprintf(stderr, "[stand-in %d] lacks " #name "\\n", getpid());  \\
    printed = true;                                                               \\
    return 801;                                                                   \\
  }
"""


class Unavailable(Exception):
    """Raised where the stand-in can't be built; says why."""


def _command(*words: str | Path) -> str:
    done = subprocess.run([str(argument) for argument in words], capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{Path(words[0]).name} fails:\n{done.stderr[-3000:]}")
    return done.stdout


def _symbols(kind: str, *files: Path) -> set[str]:
    """The names that files define or expect, without the versions of libraries."""
    listed = (line.split()[-1] for line in _command("nm", *kind.split(), *files).splitlines() if len(line.split()) > 1)
    return {name.partition("@")[0] for name in listed}


def _stubs(defined: set[str]) -> tuple[str, list[str]]:
    """Source for what PyTorch's libraries expect of CUDA and `defined` lacks, and the names of those that do not succeed."""
    libraries = sorted((SITE / "torch" / "lib").glob("lib*.so"))
    expected = _symbols("--dynamic --undefined-only", *libraries) - defined
    mathematics = {name for name in expected if _MATHEMATICS.match(name)}
    succeed = mathematics | (expected & _NOTHING_TO_DO)
    lacking = sorted(name for name in expected - succeed if _RUNTIME.match(name))
    lines = [f"SUCCEEDS({name})" for name in sorted(succeed)] + [f"LACKING({name})" for name in lacking]
    return _STUBS + "\n".join(lines) + "\n", lacking


def _build(folder: Path) -> None:
    """Compiles the library into a folder; its name appears when it is whole."""
    (folder / "crt").mkdir(exist_ok=True)
    (folder / "crt" / "host_defines.h").write_text(_HOST_DEFINES)
    include = [f"-I{path}" for path in (folder, *sorted((SITE / "nvidia").glob("*/include")))]
    compiler = ("g++", "-O2", "-fPIC", "-std=c++17", "-Wall", *include)
    objects = [folder / "cuda.o", folder / "nccl.o"]
    for compiled in objects:
        _command(*compiler, "-c", HERE / f"{compiled.stem}.cpp", "-o", compiled)
    stubs, lacking = _stubs(_symbols("--defined-only", *objects))
    (folder / "stubs.cpp").write_text(stubs)
    (folder / "lacking.txt").write_text("\n".join(lacking) + "\n")
    linked = folder / "linked.so"
    _command(
        *compiler, "-shared", "-Wl,-soname,libcuda.so.1", *objects, folder / "stubs.cpp", "-o", linked, "-ldl", "-lpthread"
    )
    linked.rename(folder / "libcuda.so.1")


def library() -> Path:
    """The stand-in's library, built at first use for these sources and this torch."""
    if not (SITE / "torch" / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable("torch is built without CUDA")
    if absent := [program for program in ("g++", "nm") if shutil.which(program) is None]:
        raise Unavailable(f"{' and '.join(absent)} not found (apt-get install g++)")
    sources = [HERE / name for name in ("build.py", "cuda.cpp", "nccl.cpp", "standin.h")]
    key = hashlib.sha256(b"".join(file.read_bytes() for file in sources) + version("torch").encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"standin-gpu-{os.getuid()}" / key
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "libcuda.so.1"
    with (folder / "lock").open("w") as lock:  # two workers of pytest start at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(folder)
    return built


def lacking() -> list[str]:
    """What this torch expects of CUDA's runtime, its driver and NCCL that the stand-in does not have."""
    return (library().parent / "lacking.txt").read_text().split()


def variables(gpus: int = 1) -> dict[str, str]:
    """The environment in which a Python program trains on the stand-in."""
    return {
        "LD_PRELOAD": str(library()),
        "PYTHONPATH": os.pathsep.join([str(HERE / "startup"), str(HERE.parents[1])]),
        "STANDIN_GPUS": str(gpus),
        "OMP_NUM_THREADS": "1",
        "DISABLE_ADDMM_CUDA_LT": "1",  # cuBLASLt is asked which of its kernels to take; cuBLAS is not
    }
