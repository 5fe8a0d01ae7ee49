"""python -m project fit --config configs/ddp.yaml"""

import os
import signal
import sys

from project.survive.signals import SIGNALS


def main() -> None:
    if sys.argv[1:] in (["--version"], ["-V"]):  # answered before the libraries are loaded, which takes seconds
        from project import __version__

        print(f"project {__version__}")
        return
    SIGNALS.listen(signal.SIGTERM, signal.SIGUSR1)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's library is chatty from the moment it is loaded
    try:
        from project.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
