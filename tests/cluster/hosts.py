"""Hosts on one machine: network namespaces, each with an address, a hostname and a hosts file of its own, on one bridge.

    with Hosts(2, folder) as hosts:
        hosts[0].start([...], output=file)       # on h1
        hosts[1].cut()                           # h2 has lost its link

The bridge is in a namespace, too: nothing is changed outside. Two test runs side by side share neither names nor addresses.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.cluster.machine import command, end, missing, need

_PREFIX = "hosts-test-"


@dataclass(frozen=True)
class Host:
    """A host; its only interface is eth0."""

    name: str
    address: str
    namespace: str
    switch: str
    hosts_file: Path
    mounts: tuple[tuple[Path, Path], ...] = ()
    """What this host sees in place of what lies there."""

    def seeing(self, thing: Path, place: Path) -> "Host":
        return replace(self, mounts=(*self.mounts, (thing, place)))

    def named_by_debian(self) -> "Host":
        """As Debian installs it: the host's own name leads to 127.0.1.1."""
        file = self.hosts_file.with_name(f"hosts-{self.name}")
        file.write_text(self.hosts_file.read_text().replace(f"{self.address} {self.name}\n", f"127.0.1.1 {self.name}\n"))
        return replace(self, hosts_file=file)

    def enter(self) -> list[str]:
        """What stands before a command that is to run on this host."""
        # nsenter and not `ip netns exec`, which hides /sys/fs/cgroup.
        bound = [(self.hosts_file, Path("/etc/hosts")), *self.mounts]
        mounts = "; ".join(f"mount --bind {thing} {place}" for thing, place in bound)
        become = f'hostname {self.name}; {mounts}; exec "$@"'
        return ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--uts", "sh", "-c", become, "sh"]

    def start(self, words: Sequence[str], output: Any, cwd: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a program on this host; its id is that of the process itself."""
        return subprocess.Popen([*self.enter(), *words], cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT)

    def pids(self) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def kill(self) -> None:
        """Ends all that runs here, at once: what losing the host is to the others, but for its silence (`cut` is that)."""
        end(self.pids)

    def cut(self) -> None:
        """The cable is pulled."""
        command("ip", "-n", self.switch, "link", "set", f"to-{self.name}", "down")

    def mend(self) -> None:
        command("ip", "-n", self.switch, "link", "set", f"to-{self.name}", "up")

    def drop(self, port: int) -> None:
        """A firewall drops what comes in for this TCP port."""
        self._filter(f"tcp dport {port} drop")

    def _filter(self, rule: str) -> None:
        rules = f"table inet test {{ chain input {{ type filter hook input priority 0; iifname eth0 {rule}; }}; }}"
        command("ip", "netns", "exec", self.namespace, "nft", rules)

    def close(self, ports: str) -> None:
        """A firewall lets nobody connect to these TCP ports ('1024-65535'); who is connected stays so."""
        self._filter(f"tcp dport {ports} tcp flags & (syn | ack) == syn drop")

    def swallow(self, size: int, sender: "Host | None" = None) -> None:
        """IP packets of more bytes than this get lost on their way here, as in a tunnel with a wrong MTU; see `unbundle`."""
        self._filter(f"{f'ip saddr {sender.address} ' if sender else ''}ip length > {size} drop")

    def bundle(self, packets: int) -> None:
        """So many packets are handed on in one piece."""
        command("ip", "-n", self.namespace, "link", "set", "eth0", "gso_max_segs", str(packets))

    def slow(self, rate: str) -> None:
        """The link sends no faster than this ('10mbit')."""
        words = f"qdisc add dev eth0 root tbf rate {rate} burst 32kbit latency 400ms"
        command("tc", "-n", self.namespace, *words.split())

    def heal(self) -> None:
        """Takes all of the above back."""
        self.mend()
        self.bundle(65535)
        subprocess.run(["ip", "netns", "exec", self.namespace, "nft", "delete", "table", "inet", "test"], capture_output=True)
        subprocess.run(["tc", "-n", self.namespace, "qdisc", "del", "dev", "eth0", "root"], capture_output=True)


class Hosts(list[Host]):
    """h1, h2, ... on 10.77.0.0/24."""

    _made = 0

    def __init__(self, count: int, folder: Path) -> None:
        need("iproute2 nftables", "ip", "tc", "nft", "nsenter", "unshare")
        _sweep()
        Hosts._made += 1
        prefix = f"{_PREFIX}{os.getpid()}-{Hosts._made}-"
        self.switch = f"{prefix}switch"
        hosts_file = folder / "hosts"
        super().__init__(Host(f"h{i}", f"10.77.0.{i}", f"{prefix}h{i}", self.switch, hosts_file) for i in range(1, count + 1))
        hosts_file.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self))

    def __enter__(self) -> "Hosts":
        try:
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _connect(self) -> None:
        made = subprocess.run(["ip", "netns", "add", self.switch], capture_output=True, text=True)
        if made.returncode:
            missing(f"this machine allows no network namespaces: {made.stderr.strip()}")
        command("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        command("ip", "-n", self.switch, "link", "set", "br0", "up")
        for host in self:
            command("ip", "netns", "add", host.namespace)
            port = f"to-{host.name}"
            link = f"link add eth0 type veth peer name {port} netns {self.switch}"
            command("ip", "-n", host.namespace, *link.split())
            command("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
            command("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                command("ip", "-n", host.namespace, "link", "set", interface, "up")

    def __exit__(self, *_: object) -> None:
        for host in self:
            host.kill()
        for namespace in (*(host.namespace for host in self), self.switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)

    def unbundle(self) -> None:
        """Connections that are made from now on send packets as a wire carries them, and not 64 KiB at once."""
        for host in self:
            host.bundle(1)

    def kill(self) -> None:
        """Ends all that runs on any of them, and mends what was broken."""
        for host in self:
            host.kill()
            host.heal()


def _sweep() -> None:
    """Removes what a test run left that was killed itself."""
    for folder in Path("/run/netns").glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            host = Host("", "", folder.name, "", Path())
            host.kill()
            subprocess.run(["ip", "netns", "del", folder.name], capture_output=True)
