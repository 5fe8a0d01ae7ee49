"""A Ray cluster of one's own on this machine, or one that is there already; and what Ray prints of itself is left out."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from project.errors import UserError

_PATIENCE = 10.0  # seconds for a cluster to answer
_LIBRARY = "ray[train]>=2.60"
# What the user has set stays.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",  # for a dashboard that is not there
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    # Ray looks every two seconds by default, and for a node that is taken away every five.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    # How long Ray waits for places that it believes to be free. A host that was lost counts as free for up to 20 s: with a
    # longer wait, an elastic run would not shrink in that time; with fixed workers Ray waits again and again.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
}
_OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux, too, this binds all of Ray's ports to 127.0.0.1
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "token",
}


def library() -> Any:
    """Ray, or what to install."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.train
    except ImportError as error:
        raise UserError(f'Ray can\'t be loaded: {error}. HINT: pip install "project[ray]" (which is {_LIBRARY}).') from error
    return ray


@contextmanager
def connected(address: str | None, cpus: int) -> Iterator[Any]:
    """Ray, connected to the cluster at this address; without one, to a cluster of its own with so many CPUs at least."""
    if address is not None:
        _answers(address)
    else:  # Ray reads these when it is loaded
        for name, value in _OWN.items():
            os.environ.setdefault(name, value)
    ray = library()
    quiet = {"log_to_driver": False, "logging_level": "CRITICAL", "include_dashboard": None if address else False}
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        if address is None and os.environ["RAY_AUTH_MODE"] == "token" and not _has_token():
            token = Path(folder) / "token"
            token.touch(0o600)
            token.write_text(os.urandom(32).hex())
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        try:
            if address is None:
                ray.init("local", num_cpus=max(cpus, os.cpu_count() or 1), **quiet)
            else:
                ray.init(address, **{name: value for name, value in quiet.items() if value is not None})
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            where = f"with the Ray cluster at {address}" if address else "with a Ray cluster of its own"
            hint = (
                "ray status --address says whether it is there; all hosts need the same token (ray get-auth-token)"
                if address
                else "the session's log in /tmp/ray says more"
            )
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"There is no connection {where}: {reason[0]} HINT: {hint}.") from error
        try:
            yield ray
        finally:
            with suppress(Exception):
                ray.shutdown()


def last_words(error: BaseException) -> str:
    """Ray tells all that it knows, and at the end why."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def _answers(address: str) -> None:
    """Ray would try for minutes, and not say where."""
    host, _, port = address.rpartition(":")
    if address in ("auto", "local"):
        return
    if not port.isdigit() or "/" in address:
        raise UserError(f"--address {address}: that is no address of a Ray cluster. HINT: HOST:6379, or auto.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except OSError as error:
        raise UserError(
            f"There is no connection with the Ray cluster at {address}: {error.strerror or error}. "
            "HINT: ray start --head there; a firewall that is open for its port."
        ) from error


def _has_token() -> bool:
    given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return given or (Path.home() / ".ray" / "auth_token").exists()
