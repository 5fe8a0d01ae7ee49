"""Connects to a Ray cluster, or starts one of our own on this machine, and keeps quiet what Ray prints of itself."""

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from project.errors import UserError
from project.survive.signals import EXIT_CODES

_PATIENCE = 10.0  # seconds for a cluster to answer
# The user's own settings stay.
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_SETTINGS_OF_OURS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux, too, this binds all of Ray's ports to 127.0.0.1
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


def say(level: str, text: str) -> None:
    """Prints a line that looks like the training's own."""
    print(f"{time.strftime('%H:%M:%S')} {level:7} {text}", file=sys.stderr, flush=True)


def listen(signals: list[int]) -> None:
    """Notes signals to this process in a list: they are for the training."""
    for number in EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, frame: signals.append(received))


def last_line(error: BaseException) -> str:
    """Returns the last line of an error from Ray, which has the cause, cut to 300 characters."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip()[:300] if lines else type(error).__name__


@contextmanager
def connected(address: str | None, cpus: int) -> Iterator[None]:
    """Connects to the cluster at this address; without one, starts a cluster with so many CPUs at least."""
    if address is not None:
        _check(address)
    for name, value in {**_SETTINGS, **({} if address else _SETTINGS_OF_OURS)}.items():  # Ray reads them when it is loaded
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UserError(f'Ray can\'t be loaded: {error}. HINT: pip install "samerun[ray]" (which is ray>=2.60).') from error
    own = {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level="CRITICAL", **({} if address else own))
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where, hint = "with a Ray cluster of its own", "the session's log in /tmp/ray says more"
        if address:
            where = f"with the Ray cluster at {address}"
            hint = "ray status --address says whether it is there; all hosts need the same token (ray get-auth-token)"
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"There is no connection {where}: {reason} HINT: {hint}.") from error
    try:
        yield
    finally:
        with suppress(Exception):
            ray.shutdown()


def _check(address: str) -> None:
    """Refuses an address that does not answer: Ray would retry for minutes, and not name the address."""
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
