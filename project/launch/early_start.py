"""Starts ranks 1 and up of this host together with rank 0 under plain Python, and not seconds later, when rank 0 has loaded its
libraries.

Their number is read from the command line and the YAML before PyTorch is loaded, so nothing heavy is imported here. When the
configuration is resolved, `keep` compares: after a wrong guess these processes end, and Lightning starts the ranks later.
"""

import logging
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from project.config_files import documents, expand, run_config, setting
from project.launch.sweep import with_trial

log = logging.getLogger(__name__)

_MARK = "PROJECT_EARLY_RANKS"
_SET_HERE = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# An environment with one of these variables belongs to a launcher, which starts the ranks.
LAUNCHERS = {*_SET_HERE, _MARK, "RANK", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PROJECT_SUPERVISED"}
_VERBS = ("fit", "validate", "test", "predict", "doctor")
_GRACE = 20.0  # seconds that rank 0 has to end by itself when another rank has failed

processes: list["subprocess.Popen[bytes]"] = []
"""The processes of ranks 1 and up, in rank 0; none where they were not started early."""


def ranks(devices: object, accelerator: object, gpus: int) -> int:
    """Returns how many processes `trainer.devices` means on this host, or 0 where this is not known."""
    on_cpu = accelerator == "cpu" or (accelerator in (None, "auto") and not gpus)
    if devices in (None, "auto", -1, "-1"):
        return 1 if on_cpu else gpus
    if isinstance(devices, str):
        return int(devices) if devices.isdecimal() else 0
    return devices if isinstance(devices, int) else len(devices) if isinstance(devices, (list, tuple)) else 0


def starts_ranks(strategy: object) -> bool:
    """Returns whether Lightning would start processes for this `trainer.strategy` as `start` does; for some it forks."""
    named = strategy.get("class_path") if isinstance(strategy, Mapping) else strategy
    if type(strategy).__name__ == "Sharded" or named in ("sharded", "sharded_node", "sharded_gradients", "project.Sharded"):
        return True
    return strategy in (None, "auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false")


def gpus() -> int:
    """Returns the number of NVIDIA's GPUs, without their driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    here = sum(1 for file in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name))
    return here if visible is None else min(here, len([device for device in visible.split(",") if device.strip()]))


def free_port() -> int:
    """Returns a free port that no connection takes by chance before the ranks use it: a system assigns those from 32768 on."""
    for _ in range(100):
        port = random.SystemRandom().randrange(15_000, 32_000)
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of a hundred ports is free")


def early_settings(words: list[str], section: str, *names: str) -> dict[str, object]:
    """Returns settings of a command line, read before anything heavy is loaded; none where it trains nothing, or is wrong."""
    if {"-h", "--help"} & {*words} or any(flag.startswith(("--print_config", "--dry_run")) for flag in words):
        return {}
    try:
        expanded = expand(run_config(with_trial(list(words))))
        sections = documents(expanded)
        return {name: setting(expanded, sections, section, name) for name in names}
    except (ValueError, OSError, AttributeError):  # reported by the parser, which reads all of it
        return {}


def start(words: list[str]) -> None:
    """Starts ranks 1 and up of a command line, if it has any, with the environment that Lightning would give them."""
    if not words or words[0] not in _VERBS or not LAUNCHERS.isdisjoint(os.environ):
        return
    settings = early_settings(words, "trainer", "strategy", "devices", "accelerator")
    if not settings or not starts_ranks(settings["strategy"]):
        return
    count = ranks(settings["devices"], settings["accelerator"], gpus())
    if count < 2:
        return
    port = free_port()
    os.environ |= {"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": str(count), _MARK: str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, *sys.orig_argv[1:]]
    processes.extend(subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(rank)}) for rank in range(1, count))


def keep(
    strategy: object, devices: object, accelerator: object, count_gpus: Callable[[], int], folder: Path | None = None
) -> None:
    """Keeps the ranks that `start` has started if the resolved settings want as many, or ends them. All ranks call it.
    `folder`: the run's, of a fit.
    """
    count = int(os.environ.pop(_MARK, "1"))
    if count == 1:
        return
    if starts_ranks(strategy) and ranks(devices, accelerator, count_gpus()) == count:
        if processes:
            threading.Thread(target=_observe, args=(folder,), name="early-ranks", daemon=True).start()
        return
    if os.environ["LOCAL_RANK"] != "0":
        os._exit(0)  # rank 0 continues without this rank
    end()
    for name in _SET_HERE:
        del os.environ[name]


def undecided() -> bool:
    """Returns whether this process was started early, and the configuration, which may not need it, is not resolved yet."""
    return _MARK in os.environ and os.environ.get("LOCAL_RANK") != "0"


def take_launched(launcher: object) -> list["subprocess.Popen[bytes]"]:
    """Takes the ranks that Lightning's launcher has started, and returns all that are launched: it looks at them every 5 s and,
    where one has failed, kills this process with a signal, before it could end by itself, with a code of its own.
    """
    launched = getattr(launcher, "procs", [])
    processes.extend(launched)
    launched.clear()
    return processes


def end() -> None:
    """Ends the other ranks."""
    for process in processes:
        process.kill()
        process.wait()
    processes.clear()


def _observe(folder: Path | None) -> None:
    """Ends rank 0 when another rank has failed: it may be in a call that never ends. Where one was killed before the ranks were
    connected, it is or will be, and ends at once; else it has some seconds to end by itself.
    """
    from torch import distributed

    from project.cluster.connection import FAILED
    from project.survive.failure import EXITING, LOST_RANKS, exit_at_once, note_killed, report_killed

    watched, connected = list(processes), False
    while not any(process.poll() for process in watched):  # 0 is a good end
        if all(process.poll() == 0 for process in watched):
            return
        time.sleep(1)
        connected = connected or distributed.is_initialized()
    if connected or FAILED.is_set() or not note_killed(watched):
        time.sleep(_GRACE)
    EXITING.set()
    if note_killed(watched):
        report_killed(folder)
    else:
        ended = [f"rank {rank} with exit code {code}" for rank, process in enumerate(watched, 1) if (code := process.poll())]
        log.error("Rank 0 has not ended %.0f s after another rank has failed (%s): it is ended.", _GRACE, ", ".join(ended))
    end()
    exit_at_once(SystemExit(LOST_RANKS.exit_code))
