"""Questions to Slurm. No other import than the standard library's: some are asked before anything else is loaded."""

import subprocess


def scontrol(*words: str, seconds: float = 30) -> subprocess.CompletedProcess[str]:
    """Runs scontrol; OSError where there is none, as in a container.

    Slurm sends its signals to a whole job step: SIGUSR1, which this program handles, ends a child. Then it is asked again.
    """
    while True:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=seconds)
        if done.returncode >= 0:
            return done
