"""torchrun as scripts/launch.sh starts it: python -m project.launch.torchrun_agent --nnodes 2 ... -m project -- fit ...

With `--join ADDRESS PORT SECONDS` before torchrun's own words, this agent joins the one that has the store, on another host.
What is ours is how it ends: the workers have the time that a checkpoint needs, and the exit code (docs/signals.md) says why, to
whoever starts it again or not, where torchrun's is always 1.
"""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from project.errors import LEFT_OUT, TRY_AGAIN, WRONG, UserError
from project.launch.nodes import nodes_file
from project.survive.exit import exit_fast
from project.survive.signals import ENDING, code_of_rank

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import RunProcsResult
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_SHUTDOWN = "300"  # seconds from a signal to SIGKILL; torchrun's own 30 are few for a checkpoint


def exit_code(failures: Mapping[int, "ProcessFailure"]) -> int:
    """Returns the exit code of the worker that failed first, as a shell has it; of several at once, of one that has not just
    lost another.
    """
    codes = [(failure.timestamp, code_of_rank(failure.exitcode)) for failure in failures.values()]
    _, code = min(codes, key=lambda failure: (failure[0], failure[1] == TRY_AGAIN))
    return code if code >= 0 else 128 - code


def patch_agent() -> None:
    """Changes how the agent of this process ends: with 2 where a worker has, as a restart would only report the same again;
    alone, where its host is left out of the run; and at the run's end it doesn't wait for hosts that are lost.
    """
    from torch.distributed.elastic.multiprocessing import PContext, SignalException
    from torch.distributed.elastic.utils import store

    class LeftOut(SignalException):
        """Raised on a host that is left out of the run."""

        code = LEFT_OUT

    wait, barrier = PContext.wait, store.barrier
    left: list[int] = []

    def wait_or_end(self: PContext, timeout: float = -1, period: float = 1) -> "RunProcsResult | None":
        result = wait(self, timeout, period)
        code = exit_code(result.failures) if result is not None and result.is_failed() else 0
        if code == WRONG:
            raise SystemExit(WRONG)  # the agent ends its other workers, and the worker has said why
        if code == LEFT_OUT:
            raise LeftOut("", signal.SIGTERM)  # after any other end, the agent closes the rendezvous for all
        if result is not None:
            left.clear()
            with suppress(OSError, ValueError):
                left[:] = [int(nodes_file(self.error_files[0]).read_text())]
        return result

    def barrier_of_those_left(store: object, world_size: int, key_prefix: str, barrier_timeout: float = 300) -> None:
        barrier(store, min([world_size, *left]), key_prefix, barrier_timeout)

    PContext.wait = wait_or_end  # type: ignore[method-assign]
    store.barrier = barrier_of_those_left  # type: ignore[assignment]


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there are workers to pass it on to: no traceback
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN)
    heard = [number.name for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]

    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

    from project.launch.agent_rendezvous import guard, join

    guard()
    patch_agent()
    words = sys.argv[1:]
    if words[:1] == ["--join"]:
        address, port, seconds = words[1:4]
        try:
            join(address, int(port), float(seconds))
        except (ValueError, DistError) as error:
            print(f"launch.sh: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        words = words[4:]
    try:
        run.main(["--signals-to-handle", ",".join(heard), *words])
    except SignalException as stopped:
        raise SystemExit(getattr(stopped, "code", 128 + stopped.sigval)) from None
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        raise SystemExit(exit_code(failed.failures)) from None
    except (RendezvousConnectionError, RendezvousClosedError, DistError) as error:
        if isinstance(error.__cause__, UserError):  # the store could not be made here
            print(f"launch.sh: {error.__cause__}", file=sys.stderr)
            raise SystemExit(1) from None
        # Where the store was: the other agents hear no more of each other, and have nowhere to meet again.
        print(
            f"launch.sh: the agents of this run have lost each other ({type(error).__name__}): the one that held them "
            "together, on the node that MASTER_ADDR names, has ended, or one has given up. The same command resumes from "
            "the newest checkpoint.",
            file=sys.stderr,
        )
        raise SystemExit(TRY_AGAIN) from None


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        exit_fast(end.code)
    exit_fast(0)
