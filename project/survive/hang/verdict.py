"""Ends a run that hangs: names who is at fault and where, writes the stacks of all ranks to the run's folder, and exits.

One rank on each host speaks; the others write. Nothing here waits for anything for long: a disk or a terminal may be what
hangs.
"""

import json
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from project.cluster import reachability
from project.errors import TRY_AGAIN
from project.survive.hang import flights, stacks
from project.survive.hang.heartbeats import Flight, Heartbeat, Member, unpacked
from project.survive.hang.leaving import Scene, flush, leave, within
from project.survive.hang.warden import dumped, started
from project.untrusted import write_text

log = logging.getLogger(__name__)

EXIT_CODE = TRY_AGAIN

SHOWN = 2  # ranks whose stacks are part of the message
_LONGEST = 20_000  # characters of a rank's stacks in a message
_PATIENCE = 5.0  # seconds for a write
_AGENT = 10.0  # seconds for a torchrun agent that is cut off
_SLOW_AGENT = 30.0  # for one that may only be busy


@dataclass(frozen=True)
class Guilty:
    """A rank that the others wait for. `quiet`: seconds without a message from it; None: it reports for itself."""

    rank: int
    host: str
    beat: Heartbeat
    quiet: float | None = None
    place: str = ""
    waits: str = ""
    stacks: str = ""

    def testify(self, dump: str) -> "Guilty":
        """Returns a copy with what only the rank itself knows."""
        text = f"{stacks.threads()}\n{stacks.loaders(dump)}".rstrip()
        return replace(
            self, place=stacks.place(stacks.main_frames()), waits=stacks.pending(flights.recorded()), stacks=text[:_LONGEST]
        )

    def packed(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        beat, since = self.beat, time.strftime("%H:%M:%S", time.localtime(self.beat.since))
        what = f"{beat.phase}, step {beat.step}, epoch {beat.epoch}"
        if self.quiet is not None:
            state = f"is silent for {self.quiet:.0f} s: stopped, dead, or cut off from the network"
            return f"rank {self.rank} on {self.host} {state}" + (f". Last heard of in: {what}" if beat.phase else "")
        text = f"rank {self.rank} on {self.host} has made no progress since {since} ({beat.idle:.0f} s), in: {what}"
        text += f", in {self.place}" if self.place else ""
        return text + (f". Its collectives under way: {self.waits}" if self.waits else "")


def guilty(content: dict[str, Any]) -> Guilty:
    return Guilty(**{**content, "beat": unpacked(content["beat"])})


@dataclass(frozen=True)
class Verdict:
    """The ranks at fault, and what the others are doing meanwhile."""

    guilty: list[Guilty]
    waiting: str = ""
    network: str = ""
    """What gets lost on the way between the hosts, if that is what they all wait for."""

    def brief(self) -> "Verdict":
        """Returns the verdict in a form that fits one short packet."""
        first = self.guilty[0]
        return Verdict([Guilty(first.rank, first.host, first.beat, first.quiet)], network=self.network)

    def packed(self) -> dict[str, Any]:
        shown = [culprit if at < SHOWN else replace(culprit, stacks="") for at, culprit in enumerate(self.guilty[:20])]
        return {"guilty": [culprit.packed() for culprit in shown], "waiting": self.waiting, "network": self.network}

    @property
    def silent(self) -> set[int]:
        return {culprit.rank for culprit in self.guilty if culprit.quiet is not None}

    def __str__(self) -> str:
        several = "ranks wait for each other: " if len(self.guilty) > 1 and not self.silent else ""
        lines = [f"The run hangs: {several}{self.guilty[0]}."]
        lines += [f"And: {culprit}." for culprit in self.guilty[1:SHOWN]]
        if (more := len(self.guilty) - SHOWN) > 0:
            lines.append(f"And {more} more in the same place.")
        if not self.silent and (finding := flights.evidence([culprit.beat for culprit in self.guilty])):
            lines.append(f"{finding}.")
        if self.network:
            lines.append(f"{self.network}.")
        if self.waiting:
            lines.append(f"Waiting for it: {self.waiting}.")
        for culprit in self.guilty[:SHOWN]:
            if culprit.stacks:
                lines.append(f"The stacks of rank {culprit.rank} on {culprit.host}:")
                lines.append(culprit.stacks)
        return "\n".join(lines)

    @property
    def hint(self) -> str:
        first = self.guilty[0]
        if self.network:
            return reachability.HINT
        if first.quiet is not None:
            return f"see whether {first.host} is up and reachable, and whether the process was stopped (SIGSTOP)."
        if (flight := flights.shared([first.beat])) and flight.stage == Flight.SCHEDULED:
            return f"see dmesg (NVRM, Xid) and nvidia-smi on {first.host}: a GPU that hangs needs a reset, or another host."
        if flights.evidence([culprit.beat for culprit in self.guilty]):
            return "see the network between them (NCCL_DEBUG=INFO, and python -m project doctor), and their GPUs."
        if first.beat.phase == "start-up" and first.beat.collective:
            return "other ranks did not come: see whether they were started, and whether they can reach MASTER_ADDR."
        if "data" in first.beat.phase:
            return "see what the dataset reads, and whether the file system answers; if it is only slow, set watchdog.at_least."
        return "if it is only slow, set watchdog.at_least, watchdog.factor or, for what is done once, watchdog.startup."


def verdict(content: dict[str, Any]) -> Verdict:
    return Verdict([guilty(entry) for entry in content["guilty"]], content["waiting"], content["network"])


def waiting(heartbeats: Iterable[tuple[Member, Heartbeat]]) -> str:
    """Returns what the ranks that are not at fault do, in a few words."""
    phases: dict[str, list[Member]] = defaultdict(list)
    for member, beat in heartbeats:
        phases[beat.phase].append(member)
    parts = []
    for phase, members in phases.items():
        first = f"rank {members[0].rank} on {members[0].host}"
        parts.append(f"{first}{f' and {len(members) - 1} more' if len(members) > 1 else ''} in: {phase}")
    return "; ".join(parts)


# The report ----------------------------------------------------------------------------------------------------------


def end(judged: Verdict, scene: Scene) -> None:
    """Writes and logs the verdict, and ends this process and those at fault on this host."""
    speaks, here = scene.speaks(judged.silent), _silent_here(judged, scene)
    own = Guilty(scene.me.rank, scene.me.host, scene.beat).testify(scene.me.dump)
    if speaks:
        judged = replace(judged, guilty=[_examined(culprit, here.get(culprit.rank)) for culprit in judged.guilty])
    if scene.folder is not None:
        folder = scene.folder
        written = [own, *(culprit for culprit in judged.guilty if speaks and culprit.rank in here)]
        within(_PATIENCE, lambda: _write(folder, judged, written))
    if speaks:
        where = f"\nThe stacks of all ranks: {scene.folder}/hang-rank*.txt" if scene.folder else ""
        again = f"All ranks end, with exit code {EXIT_CODE}. The same command goes on from the newest checkpoint."
        text = f"{judged}{where}\n{again} HINT: {judged.hint}"
        within(_PATIENCE, lambda: log.error(text))
        within(_PATIENCE, lambda: _tell_torchrun(f"{judged.guilty[0]}", scene))
    within(_PATIENCE, flush)
    cut_off = _cut_off(judged, scene)
    seconds = _AGENT if cut_off else _SLOW_AGENT if scene.speaks(judged.silent) else None
    leave(scene, EXIT_CODE, list(here.values()), seconds)


def _silent_here(judged: Verdict, scene: Scene) -> dict[int, Member]:
    """Returns the processes on this host that can't end themselves."""
    return {
        member.rank: member
        for member in scene.members
        if member.rank in judged.silent and member.machine == scene.me.machine and member.started == started(member.pid)
    }


def _examined(culprit: Guilty, member: Member | None) -> Guilty:
    if member is None or culprit.stacks:
        return culprit
    return replace(culprit, stacks=dumped(member.pid, member.dump, wake=True)[:_LONGEST])


def _write(folder: Path, judged: Verdict, ranks: list[Guilty]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for culprit in ranks:
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{judged.guilty[0]}.\n\nThis rank: {culprit}.\n\n"
        write_text(folder / f"hang-rank{culprit.rank}.txt", f"{head}{culprit.stacks}\n")
    if entries := flights.recorded():
        write_text(folder / f"hang-rank{ranks[0].rank}-collectives.json", json.dumps(entries))


def _tell_torchrun(text: str, scene: Scene) -> None:
    """Writes the message for torchrun, which reports last, and prints what it finds in this file."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": f"The run hangs: {text}", "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": message}))


def _cut_off(judged: Verdict, scene: Scene) -> bool:
    """Returns whether the host of rank 0 can't be reached: one that is up refuses a connection, or accepts it."""
    if 0 not in judged.silent or scene.members[0].machine == scene.me.machine:
        return False
    try:
        with socket.create_connection(scene.members[0].address, timeout=3):
            return False
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
