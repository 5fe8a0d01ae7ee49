"""The program: python -m project fit --config configs/ddp.yaml"""

import gc
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from project.cli.reading import ended
from project.cli.verbs import VERBS, page, refuse_verb
from project.config_files import TRAINING
from project.launch import supervisor
from project.launch.fork_server import is_fork_server
from project.launch.orphans import end_with_parent, ends_with_parent
from project.survive.exit import exit_fast, is_the_program
from project.survive.output import LOST, ignore_output_errors, open_standard_streams
from project.survive.requeue import listen_for_signals

_READERS = {
    "completion": "project.cli.completion",
    "config": "project.cli.differences",
    "runs": "project.cli.runs",
    "same": "project.cli.same",
    "report": "project.cli.report",
    "watch": "project.cli.watching",
    "profile": "project.cli.profiling",
    "sweep": "project.launch.sweep",
}
"""The verbs that read files, and need no libraries either."""
_ENGINES = {"ray": "project.launch.ray.verb", "prove": "project.cli.prove", "schema": "project.cli.schema"}
"""The verbs that start this program, elsewhere or in processes that they fork, or that look at it whole."""


def main() -> None:
    """Runs the program. Where it is to print something, a text that can't be written is an error; training continues."""
    open_standard_streams()
    prints = any(flag in ("-h", "-V", "--version") or flag.startswith(("--help", "--print_config")) for flag in sys.argv[1:])
    prints = prints or sys.argv[1:2] in (["schema"], ["manifest"])
    code: int | str | None = 0
    try:
        code = ended(_printed) if prints else _main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        gc.unfreeze()  # some libraries report objects that never end
        raise
    if "torch" in sys.modules and is_the_program("project"):
        exit_fast(code)
    gc.unfreeze()
    sys.exit(code)


def _printed() -> int:
    """Runs a command that prints, and raises the error of a text that could not be written."""
    try:
        if code := _main():
            return code
    except SystemExit as end:
        if end.code:
            raise
    sys.stdout.flush()
    if 1 in LOST:
        raise LOST[1]
    return 0


def _main() -> int:
    """Runs the program, and returns its exit code."""
    if sys.argv[1:] in (["--version"], ["-V"]):  # answered before the libraries are loaded, which takes seconds
        from project import __version__

        print(f"project {__version__}")
        return 0
    if sys.argv[1:] in (["--help"], ["-h"]):
        ignore_output_errors()
        print(page(), end="")
        return 0
    if len(sys.argv) == 3 and sys.argv[1] in TRAINING and sys.argv[2] in ("--help", "-h"):
        from project.cli.keys import help_page

        ignore_output_errors()
        print(help_page(sys.argv[1]), end="")
        return 0
    verb = "".join(sys.argv[1:2])
    if verb not in VERBS and not verb.startswith("-") and not {"RANK", "SLURM_PROCID"} & os.environ.keys():
        return ended(partial(refuse_verb, verb))  # of several ranks, the first reports it
    if module := (_READERS | _ENGINES).get(verb):
        if verb in ("sweep", *_ENGINES):  # the others have nothing else to do than to print
            ignore_output_errors()
        program = partial(import_module(module).main, sys.argv[2:])
        return ended(program) if verb in _READERS else program()
    if not is_fork_server():  # which notices the end of its supervisor by itself, and gets no signals but from there
        if ends_with_parent():
            end_with_parent()
        restarts, strikes = supervisor.limits_of(sys.argv[1:])
        if restarts:
            return supervisor.supervise(restarts, strikes)
        listen_for_signals()
    ignore_output_errors()
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        # Nothing is begun yet, and an exception in the middle of loading a library may come out as another one.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what a socket could not learn is no news
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler's library is chatty from the moment it is loaded
    from project.launch.early_start import start  # when signals are noted already

    start(sys.argv[1:])
    gc.disable()  # what the libraries make when they are loaded stays
    try:
        load_torchmetrics()
        if sys.argv[1:2] == ["bench"]:
            run = _bench()
        else:
            from project.cli.main import main as run

        gc.freeze()  # and is not looked through again and again
        gc.enable()
        signal.signal(signal.SIGINT, interrupt)
        run()
    except KeyboardInterrupt:
        return 130
    return 0


class _Patched(ModuleType):
    """Stands for scipy.signal while torchmetrics patches it. Whoever needs more of it gets it whole."""

    hamming = None  # the patch

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__path__":  # which imports of a part look for; the others, who inspects modules
            raise AttributeError(name)
        self.leave()
        return getattr(import_module("scipy.signal"), name)

    def leave(self) -> None:
        if sys.modules.get("scipy.signal") is self:
            del sys.modules["scipy.signal"]


def load_torchmetrics() -> None:
    """Loads torchmetrics without scipy.signal, which it patches for SRMRpy alone, where scipy is installed: a second."""
    if find_spec("srmrpy") or "scipy.signal" in sys.modules:
        return
    sys.modules["scipy.signal"] = patched = _Patched("scipy.signal")
    try:
        import torchmetrics  # noqa: F401
    finally:
        patched.leave()


def _bench() -> Callable[[], None]:
    """Returns the benchmark's program, which lies in a checkout's scripts/, and in no wheel."""
    checkout = Path(__file__).parents[1]
    if not (checkout / "scripts/bench/verb.py").is_file():
        print("bench belongs to a checkout of this project. HINT: clone it, and there scripts/run bench ...", file=sys.stderr)
        sys.exit(2)
    sys.path.insert(0, str(checkout))
    program: Callable[[], None] = import_module("scripts.bench.verb").main
    return program


def hash_alike() -> None:
    """Starts Python again where sets of strings would have another order in each process: in a rank, and after a restart."""
    if "PYTHONHASHSEED" not in os.environ and not sys.flags.ignore_environment:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def console() -> None:
    """Runs the console script `samerun` as `python -m project`: that finds a user's modules in the working directory, and its
    ranks are started alike.
    """
    if len(sys.argv) > 1 and sys.argv[1] in (*_READERS, "--help", "-h", "--version", "-V"):
        main()
        return
    os.environ.setdefault("PYTHONHASHSEED", "0")  # see `hash_alike`
    os.execv(sys.executable, [sys.executable, "-m", "project", *sys.argv[1:]])


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] not in _READERS:
        hash_alike()
    main()
