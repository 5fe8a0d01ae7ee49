"""The place where the ranks meet before anything else connects them: who is present, who is missing, who can't reach whom.

torch waits for a missing rank for ten minutes and more, and doesn't name it. Here every rank comes to rank 0's
port first; within a deadline rank 0 knows who came. `python -m project.cluster.rendezvous` does it for whole nodes, before
torchrun is started (scripts/launch.sh).
"""

import argparse
import errno
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from project.cluster import reachability
from project.cluster.interfaces import Route, interface_of, is_loopback, resolve, route, source_towards
from project.cluster.place import host, restarts
from project.errors import TRY_AGAIN, FaultError
from project.untrusted import parse_json, printable

log = logging.getLogger(__name__)

Value = TypeVar("Value")

_LONGEST = 1000  # characters of what another one says is wrong
_REMIND = 30.0  # seconds between two lines about who is missing
_PATIENCE = 2.0  # seconds that rank 0 waits for the others to hear the end
_PORTS = (
    "all ports must be open between the hosts, and the interface must be the one that leads there (GLOO_SOCKET_IFNAME, "
    "NCCL_SOCKET_IFNAME)."
)
_GRACE = 10.0  # seconds that the others wait longer than rank 0, which has something to say


class ToldByRankZero(SystemExit):
    """Raised when the rendezvous failed and rank 0 reports why: this rank ends in silence."""


def reach(address: str, port: int, seconds: float, longest: float = 0.2) -> None:
    """Returns once a server listens there; raises a ValueError that names the obstacle. `longest`: seconds between looks."""
    here, end, pauses = host(), time.monotonic() + seconds, _pauses(longest)
    while True:
        try:
            socket.create_connection((address, port), timeout=reachability.ATTEMPT).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise FaultError(_unreachable(here, address, port, seconds, error)) from None
            time.sleep(next(pauses))


def _pauses(longest: float) -> Iterator[float]:
    """Yields the seconds between looks for another rank: ranks that are started again come within milliseconds."""
    return chain((pause for doubling in range(20) if (pause := 0.001 * 2**doubling) < longest), repeat(longest))


def _unreachable(here: str, address: str, port: int, seconds: float, error: OSError) -> str:
    addresses = resolve(address)
    if isinstance(error, socket.gaierror):
        return (
            f"{here} does not know the host {address} (MASTER_ADDR). HINT: give its address instead of its name, or put the "
            "name into DNS or /etc/hosts."
        )
    where = f"{address}:{port}" + (f" ({', '.join(addresses)})" if addresses != [address] else "")
    start = f"{here} can't reach rank 0 at {where}, tried for {seconds:g} s: "
    if all(is_loopback(entry) for entry in addresses):
        return start + f"that is {here} itself. HINT: set MASTER_ADDR to an address of rank 0's host that the others can reach."
    if isinstance(error, ConnectionRefusedError):
        return start + "nothing listens there. HINT: is rank 0 started, on that host, with that MASTER_PORT?"
    if isinstance(error, TimeoutError):
        return start + f"no answer. HINT: a firewall? is the address right? Port {port} must be open between the hosts."
    return start + f"{error.strerror or error}. HINT: are both hosts in the same network?"


def _free(port: int) -> None:
    """Raises an error if another program listens on the port that rank 0 needs."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise FaultError(
                f"Port {port} on {host()} is in use by another program. HINT: set another MASTER_PORT, on "
                "every node the same; and only one rank 0 may be started."
            ) from None


def store_on_loopback(rank: int, port: int, timeout: timedelta) -> TCPStore:
    """Returns the store by which the ranks of one host connect. Rank 0 listens on loopback alone: whoever reaches a store can
    change what lies there, and torch's own would listen to every network that the host is in.
    """
    if rank > 0:
        reach("127.0.0.1", port, timeout.total_seconds(), 0.01)  # a TCPStore would try again only after up to a second
        return store_at("127.0.0.1", port, timeout)
    _free(port)
    listening = socket.create_server(("127.0.0.1", port))
    port = listening.getsockname()[1]  # 0 was any that is free
    return TCPStore("127.0.0.1", port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())


def store_at(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Returns the store of whoever listens there: torchrun's agent, say."""
    return TCPStore(address, port, None, False, timeout, wait_for_workers=False)


class Rendezvous:
    """The ranks that have come to rank 0's port. Every method is collective."""

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        port: int,
        seconds: float,
        expected: Callable[[int], str | None] = lambda rank: None,
        noun: str = "rank",
        hosted: bool = False,
        one_host: bool = False,
    ) -> None:
        """Connects to rank 0's port. `expected`: the host that a rank should be on, where the launcher knows. `hosted`: the
        launcher listens there. `one_host`: all ranks are on this one, and no port listens to others."""
        self.rank, self.size, self.seconds, self.noun = rank, size, seconds, noun
        self.address, self.port, self.expected = address, port, expected
        self._round = 0
        timeout = timedelta(seconds=seconds)
        if one_host and not hosted:
            store = store_on_loopback(rank, port, timeout)
        elif rank > 0 or hosted:
            reach(address, port, seconds)
            store = store_at(address, port, timeout)
        else:  # rank 0 need not know itself by the name that the others use
            _free(port)
            store = TCPStore("127.0.0.1", port, None, True, timeout, wait_for_workers=False)
        # An agent's store outlives the ranks, and so may that of ranks which a supervisor ends, for a moment. Agents that join
        # later have started their ranks less often.
        starts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if hosted else "0"
        self.store = PrefixStore(f"rendezvous/{starts}.{restarts()}", store)
        with ExitStack() as stack:
            if rank == 0:
                name = f"{host()} 0"
                listener = stack.enter_context(closing(reachability.Listener("127.0.0.1" if one_host else "", lambda: name)))
                self.store.set("listener", str(listener.port))
            else:  # before anything is sent that is longer than a short packet
                self._check_packets(int(self.store.get("listener")))
            self._sign_in()

    def _check_packets(self, port: int) -> None:
        """Checks that packets of any size reach rank 0's host and come back; otherwise both hosts report it."""
        answer = reachability.probe_any(resolve(self.address), port)  # where none is answered, that is looked at later
        if answer.limit is None:
            return
        here = host()
        text = reachability.lost(answer, here, answer.name.rpartition(" ")[0])
        self.store.set("problem", text)  # which is short enough
        if self.store.add(f"said/{here}", 1) > 1:
            raise ToldByRankZero(1)
        raise FaultError(f"{text}. HINT: {reachability.HINT}")

    def _sign_in(self) -> None:
        here = host()
        if self.rank == 0:
            self.store.set("size", str(self.size))
        size = int(self.store.get("size"))
        times = self.store.add(f"came/{self.rank}", 1)
        self.store.set(f"host/{self.rank}/{times}", here)
        if size != self.size:
            self._complain(
                f"{self.noun.capitalize()} {self.rank} on {here} was told of {self.size} {self.noun}s, and {self.noun} 0 of "
                f"{size}. HINT: start all with the same NNODES (WORLD_SIZE)."
            )
        if times > 1:
            first = self.store.get(f"host/{self.rank}/1").decode()
            self._complain(
                f"{self.noun.capitalize()} {self.rank} has come twice: from {first} and from {here}. HINT: every {self.noun} "
                "needs a number of its own (NODE_RANK, RANK), and an old run must have ended."
            )
        self.hosts = _apart(self.exchange([here, _identity()]))

    def _complain(self, text: str) -> NoReturn:
        """Leaves the problem for rank 0 to report, to all ranks."""
        self.store.set("problem", text)
        raise ToldByRankZero(1)

    def end(self, text: str) -> NoReturn:
        """Ends all ranks; rank 0 reports the problem."""
        self.close()
        if self.rank == 0:
            raise FaultError(text)
        raise ToldByRankZero(1)

    def exchange(self, value: Value) -> list[Value]:
        """Returns what every rank contributes (anything that JSON can hold), by rank."""
        number, self._round = self._round, self._round + 1
        self.store.set(f"{number}/{self.rank}", json.dumps(value))
        answer: list[Value] | None = None
        if self.rank == 0:
            try:
                self._await(number)
                answer = [parse_json(self.store.get(f"{number}/{rank}")) for rank in range(self.size)]
            except ValueError:
                self.store.set(f"{number}/all", "null")
                self.close(sum(self.store.check([f"{number}/{rank}"]) for rank in range(self.size)))
                raise
            self.store.set(f"{number}/all", json.dumps(answer))
            return answer
        with suppress(dist.DistError):
            self.store.wait([f"{number}/all"], timedelta(seconds=self.seconds + _GRACE))
            answer = parse_json(self.store.get(f"{number}/all"))
        if answer is None:
            self.close()
            raise ToldByRankZero(1)
        return answer

    def _await(self, number: int) -> None:
        end, remind, pauses = time.monotonic() + self.seconds, time.monotonic() + _REMIND, _pauses(0.05)
        while missing := [rank for rank in range(self.size) if not self.store.check([f"{number}/{rank}"])]:
            if self.store.check(["problem"]):
                problem = printable(self.store.get("problem").decode(errors="replace"), _LONGEST)
                raise FaultError(problem if "HINT" in problem else f"{problem}. HINT: {reachability.HINT}")
            now = time.monotonic()
            if now > end:
                raise FaultError(
                    f"After {self.seconds:g} s {self.size - len(missing)} of {self.size} {self.noun}s have come to "
                    f"{self.address}:{self.port}, from {self._here()}. Missing: {self._named(missing)}.{self._doubt()} HINT: "
                    "what do they print? Are they started with this MASTER_ADDR and MASTER_PORT, and is the port open?"
                )
            if now > remind:
                log.warning("Waiting for %s", self._named(missing))
                remind = now + _REMIND
            time.sleep(next(pauses))

    def close(self, members: int | None = None) -> None:
        """Keeps rank 0 until those who came have read the last answer: the store ends with its process."""
        end = time.monotonic() + _PATIENCE
        with suppress(dist.DistError):  # rank 0 is gone, then
            heard = self.store.add("heard", 1)
            while self.rank == 0 and heard < (members or self.size) and time.monotonic() < end:
                time.sleep(0.02)
                heard = self.store.add("heard", 0)

    def _here(self) -> str:
        came = [rank for rank in range(self.size) if self.store.check([f"host/{rank}/1"])]
        return _first_of(list(dict.fromkeys(self.store.get(f"host/{rank}/1").decode() for rank in came)))

    def _named(self, ranks: Sequence[int]) -> str:
        return _first_of([f"{self.noun} {rank}" + (f" ({host})" if (host := self.expected(rank)) else "") for rank in ranks])

    def _doubt(self) -> str:
        known = resolve(self.address)
        if known and (is_loopback(known[0]) or interface_of(known[0])):
            return ""
        return f" {self.address} ({', '.join(known) or 'unknown'}) is not an address of this host."

    def find_route(self) -> Route | None:
        """Returns the interface by which this host reaches the others, all of them tried; None if there are no others."""
        if len(set(self.hosts)) == 1:
            return None
        ways = self.exchange(source_towards(self.address))
        towards = self.address
        if self.hosts[self.rank] == self.hosts[0]:  # rank 0's own name may stand for 127.0.1.1 here
            known = (way for host, way in zip(self.hosts, ways, strict=True) if way and host != self.hosts[0])
            towards = next(known, self.address)  # a host without a way reports that itself
        chosen, problem = None, None
        try:
            chosen = route(towards)
        except ValueError as error:
            problem = str(error)
        if problems := [*filter(None, self.exchange(problem))]:  # if one rank fails, all end
            self.end(problems[0])
        assert chosen is not None
        self._check_ways(chosen.address)
        return chosen

    def leaders(self) -> list[int]:
        """Returns the first rank of each host."""
        return [self.hosts.index(host) for host in dict.fromkeys(self.hosts)]

    def _check_ways(self, address: str) -> None:
        """Checks that every host reaches every other at its address, on any port: the ranks connect there."""
        if problems := [problem for rank_problems in self.exchange(self._try_ways(address)) for problem in rank_problems]:
            more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
            hint = _PORTS if any(is_port for _, is_port in problems) else reachability.HINT
            self.end(f"{'; '.join(text for text, _ in problems[:4])}{more}. HINT: {hint}")

    def _try_ways(self, address: str) -> list[tuple[str, bool]]:
        """Returns what blocks the way to the other hosts, and whether it may be a closed port."""
        leaders, place, others = self.leaders(), None, list[tuple[int, str, int]]()
        with ExitStack() as stack, ThreadPoolExecutor(32) as pool:
            if self.rank in leaders:
                name = f"{self.hosts[self.rank]} {self.rank}"
                place = address, stack.enter_context(closing(reachability.Listener(address, lambda: name))).port
            places = self.exchange(place)
            if place:
                others = [(rank, *other) for rank in leaders if rank != self.rank and (other := places[rank])]
            answers = list(pool.map(lambda other: self._try(*other), others))
            self.exchange(None)  # all have tried before any listener closes
        return [answer for answer in answers if answer]

    def _try(self, rank: int, address: str, port: int) -> tuple[str, bool] | None:
        answer, here, other = reachability.probe(address, port), self.hosts[self.rank], self.hosts[rank]
        start = f"{here} can't reach {other} at {address}: "
        if (error := answer.error) is not None:
            return start + ("no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)), True
        if answer.name != f"{other} {rank}":
            return f"{start}{answer.name or 'another program'} answers there", True
        return None if answer.limit is None else (reachability.lost(answer, here, other), False)


def _first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _identity() -> str:
    """Returns what distinguishes this host from another one of the same name: its boot, and its network."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    return ""


def _apart(members: Sequence[Sequence[str]]) -> list[str]:
    """Returns the ranks' hosts by name; a number distinguishes hosts that share a name."""
    names = []
    for name, identity in members:
        identities = list(dict.fromkeys(other for same, other in members if same == name))
        number = identities.index(identity)
        names.append(f"{name}#{number + 1}" if number else name)
    return names


def main() -> None:
    """A roll call of nodes, before torchrun: each says which one it is, and all learn whether all are there."""
    parser = argparse.ArgumentParser(prog="python -m project.cluster.rendezvous", description=main.__doc__)
    for name in ("node-rank", "nodes", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--processes", type=int, required=True)
    words = parser.parse_args()
    logging.basicConfig(format="launch.sh: %(message)s")
    try:
        rendezvous = Rendezvous(words.node_rank, words.nodes, words.address, words.port, words.seconds, noun="node")
        counts = rendezvous.exchange(words.processes)
        if len(set(counts)) > 1:
            shown = ", ".join(f"{host}: {count}" for host, count in zip(rendezvous.hosts, counts, strict=True))
            rendezvous.end(
                f"The nodes start different numbers of processes ({shown}). HINT: set NPROC_PER_NODE, on all the same."
            )
        rendezvous.close()
    except ValueError as error:
        print(f"launch.sh: {error}", file=sys.stderr)
        sys.exit(1)
    except dist.DistError:
        print(f"launch.sh: node 0, at {words.address}:{words.port}, has gone while the nodes met. Try again.", file=sys.stderr)
        sys.exit(TRY_AGAIN)


if __name__ == "__main__":
    main()
