"""Finds the network interface that leads to the other hosts, and the addresses of this host. Standard library only.

gloo asks the host's own name for its address, and on Debian that answers 127.0.1.1; NCCL takes the first interface it likes.
Here the interface is the one through which the other hosts are reached. For scripts/launch.sh,

    python -m project.cluster.interfaces host1 60     prints "10.0.0.2 0": my address towards host1, and whether I am host1;
                                                      waits for so many seconds until host1 is known
"""

import fcntl
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from project.cluster.place import host
from project.errors import FaultError, UserError

_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def _ask(request: int, interface: str) -> bytes:
    """Returns what the kernel answers to a request about an interface: its name in 16 bytes, and then the answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return fcntl.ioctl(asking.fileno(), request, interface[:15].encode().ljust(256, b"\0"))


def addresses() -> dict[str, list[str]]:
    """Returns this host's interfaces and their addresses, IPv4 first."""
    interfaces: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name, own in interfaces.items():
        with suppress(OSError):  # it has no IPv4 address
            own.append(socket.inet_ntoa(_ask(_SIOCGIFADDR, name)[20:24]))
    with suppress(OSError):  # no IPv6 here
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            interfaces.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return interfaces


def resolve(name: str) -> list[str]:
    """Returns the addresses of a name on this host, in the order in which they are tried; [] if it does not resolve."""
    with suppress(socket.gaierror):
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
    return []


def source_towards(name: str) -> str | None:
    """Returns this host's address from which packets to a host of that name leave; None if there is no route."""
    return next((own for address in resolve(name) if (own := source(address))), None)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def source(address: str) -> str | None:
    """Returns this host's address from which packets to another address leave; None if there is no route."""
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: UDP
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    return next((name for name, own in addresses().items() if address in own), None)


@dataclass(frozen=True)
class Route:
    """The interface and the address through which this host reaches the others."""

    interface: str
    address: str
    chosen: bool
    """By us; else by the environment."""

    def __str__(self) -> str:
        return f"{self.interface} ({self.address})"


def route(towards: str, environment: Mapping[str, str] = os.environ) -> Route:
    """Returns the interface to use towards an address: the environment's choice if there is one, else the way packets take."""
    interfaces = addresses()
    for variable in (GLOO, NCCL):
        _check(variable, environment.get(variable), interfaces)
    if given := environment.get(GLOO):
        return Route(given, next(iter(interfaces[given]), "no address"), chosen=False)
    own = source_towards(towards)
    if own is None or (name := interface_of(own)) is None:
        shown = ", ".join(f"{name} ({', '.join(held)})" for name, held in interfaces.items() if held)
        raise FaultError(
            f"{host()} has no route to {towards}; it has {shown}. HINT: is it in the same network? Otherwise "
            f"{GLOO} and {NCCL} name the interface to use."
        )
    return Route(name, own, chosen=True)


def _check(variable: str, given: str | None, interfaces: Mapping[str, list[str]]) -> None:
    """Raises an error if a named interface is missing. NCCL takes several, beginnings of names, and '^' for 'all but'."""
    if not given or given.startswith("^"):
        return
    names = given.removeprefix("=").split(",")
    if variable == GLOO:
        missing = [name for name in names if name not in interfaces]
    else:
        missing = [] if any(name.startswith(part) for part in names for name in interfaces) else names
    if missing:
        raise UserError(
            f"{variable}={given}, and {host()} has no interface {', '.join(missing)}. It has "
            f"{', '.join(name for name, held in interfaces.items() if held)}. "
            f"HINT: unset {variable}, and the right one is chosen."
        )


def use(route: Route) -> None:
    """Sets this interface for gloo and NCCL, unless the environment has set another."""
    os.environ.setdefault(GLOO, route.interface)
    os.environ.setdefault(NCCL, f"={route.interface}")


def use_loopback() -> None:
    """Sets loopback for gloo: all ranks are on this host, and no port should listen on its networks."""
    name = interface_of("127.0.0.1")
    if name is not None:
        os.environ.setdefault(GLOO, name)


def own_address() -> str:
    """Returns the address of the interface through which the ranks communicate, once it has been chosen."""
    return next(iter(addresses().get(os.environ.get(GLOO, ""), [])), "127.0.0.1")


def mtu() -> int:
    """Returns the bytes of the longest packet that leaves by that interface."""
    # Not from /sys: what is mounted there may be of another network namespace.
    with suppress(OSError):
        return int.from_bytes(_ask(_SIOCGIFMTU, os.environ.get(GLOO, ""))[16:20], sys.byteorder)
    return 1500


def towards(name: str) -> tuple[str, bool]:
    """Returns the address by which this host and another one reach each other, and whether that host is this one."""
    target = next(iter(resolve(name)), None)
    own = source(target) if target else None
    if target is None or own is None:
        raise FaultError(f"{host()} " + ("has no route to" if target else "does not know the host") + f" {name}.")
    here = own == target or is_loopback(target)
    if is_loopback(own) and name != "localhost" and name != target:  # Debian's own name for itself leads nobody else here
        own = next((candidate for held in addresses().values() for candidate in held if not is_loopback(candidate)), own)
    return own, here


def known(name: str, seconds: float) -> None:
    """Waits until a name resolves, `seconds` at most: a pod's name does once the pod has started."""
    end = time.monotonic() + seconds
    if seconds and not resolve(name):
        print(f"launch.sh: waiting for the name {name}, {seconds:g} s at most", file=sys.stderr, flush=True)
    while not resolve(name) and time.monotonic() < end:
        time.sleep(0.5)  # nobody tells when a name becomes known


if __name__ == "__main__":
    known(sys.argv[1], float((sys.argv[2:] or ["0"])[0]))
    try:
        print("{} {:d}".format(*towards(sys.argv[1])))
    except ValueError as error:
        sys.exit(f"launch.sh: {error} HINT: MASTER_ADDR is a name or an address that every node knows.")
