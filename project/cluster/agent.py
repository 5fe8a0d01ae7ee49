"""torchrun as scripts/launch.sh starts it: python -m project.cluster.agent --nnodes 2 ... -m project -- fit ...

With `--clock IS_HOST ADDRESS PORT SECONDS` before torchrun's own words, the agents of several hosts go by one clock.

What is ours is how it ends. A signal reaches the workers, which then have the time that a checkpoint needs; SIGUSR1, too, which
is Slurm's warning before the time limit; SIGHUP not under nohup. And the exit code is the one that a shell expects of a program
that this signal ends, where torchrun's is 1 after a traceback.
"""

import os
import signal
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_SHUTDOWN = "300"  # seconds from a signal to SIGKILL; torchrun's own 30 are few for a checkpoint


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there are workers to pass it on to: no traceback
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN)
    heard = [number.name for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]

    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException

    from project.cluster.run_clock import run_clock

    clock: AbstractContextManager[None] = nullcontext()
    words = sys.argv[1:]
    if words[:1] == ["--clock"]:
        is_host, address, port, seconds = words[1:5]
        clock, words = run_clock(is_host == "1", address, int(port), float(seconds)), words[5:]
    with ExitStack() as held:
        try:
            held.enter_context(clock)
        except (ValueError, DistError) as error:
            print(f"launch.sh: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        try:
            run.main(["--signals-to-handle", ",".join(heard), *words])
        except SignalException as stopped:
            raise SystemExit(128 + stopped.sigval) from None


if __name__ == "__main__":
    main()
