"""Addresses: by which of its own this host reaches another one. Standard library only, for scripts/launch.sh asks it too.

python -m project.cluster.addresses host1        prints "10.0.0.2 0": my address towards host1, and whether I am host1
"""

import fcntl
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915


def towards(name: str) -> tuple[str, bool]:
    """The address by which this host reaches another one, and whether that one is this host itself."""
    family, _, _, _, target = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
    theirs = str(target[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing: it only asks the routes
        own = str(probe.getsockname()[0])
    here = own == theirs or _loopback(theirs)
    if _loopback(own) and not (name == "localhost" or _loopback(name)):
        own = _first_of_mine()  # Debian has a host's own name at 127.0.1.1, which leads nobody else here
    return own, here


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _first_of_mine() -> str:
    """The IPv4 address of the first interface that is none of the loopback; 127.0.0.1 where there is no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
            except OSError:
                continue  # it has none
            if not _loopback(address := socket.inet_ntoa(reply[20:24])):
                return address
    return "127.0.0.1"


if __name__ == "__main__":
    try:
        address, here = towards(sys.argv[1])
    except OSError as error:
        sys.exit(f"{sys.argv[1]} can't be reached from {socket.gethostname()}: {error.strerror}.")
    print(address, int(here))
