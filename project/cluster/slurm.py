"""Questions to Slurm. No other import than the standard library's: some are asked before anything else is loaded."""

import subprocess

_PATIENCE = 30  # seconds for an answer


def scontrol(*words: str) -> subprocess.CompletedProcess[str] | None:
    """What scontrol did, or None where there is none (in a container, say) or no answer came.

    Slurm sends its signals to a whole job step: SIGUSR1, which this program handles, ends a child. Then it is asked again.
    """
    while True:
        try:
            done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=_PATIENCE)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode >= 0:
            return done
