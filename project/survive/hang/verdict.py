"""Ends a run that hangs: names who is at fault and where, writes the stacks of all ranks to the run's folder, and exits.

One rank on each host reports; the others write. Nothing here waits for anything for long: a disk or a terminal may be what
hangs.
"""

import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from project.cluster import reachability
from project.cluster.processes import read_dump, start_time
from project.cluster.signed import Message
from project.errors import TRY_AGAIN
from project.launch.fork_server import tell_supervisor
from project.survive.failure import resumption, tell_torchrun
from project.survive.hang import flights, stacks
from project.survive.hang.heartbeats import Flight, Heartbeat, Member, heartbeat_from_dict
from project.survive.hang.leaving import RankContext, exit_process, flush, run_with_timeout
from project.untrusted import write_text

log = logging.getLogger(__name__)

SHOWN = 2  # ranks whose stacks are part of the message
_LONGEST = 20_000  # characters of a rank's stacks in a message
_PATIENCE = 5.0  # seconds for a write
_AGENT = 20.0  # seconds for a torchrun agent: it may be cut off, or only busy


@dataclass(frozen=True)
class RankAtFault:
    """Describes a rank that the others wait for, or one that reports its own state.

    `silent_for`: seconds without a message from it; None: it reports for itself. `place`: the call that its main thread is in.
    """

    rank: int
    host: str
    beat: Heartbeat
    silent_for: float | None = None
    place: str = ""
    stacks: str = ""

    def with_stacks(self, dump: str) -> "RankAtFault":
        """Returns a copy with the stacks of this process, which only the rank itself can read.

        `dump`: the file into which loader processes write their stacks.
        """
        loaders = stacks.loader_stacks(dump)
        text = f"{stacks.thread_stacks()}\n{loaders}".rstrip()
        return replace(
            self,
            place=stacks.innermost_loader_call(loaders) or stacks.innermost_call(stacks.main_frames()),
            stacks=text[:_LONGEST],
        )

    def __str__(self) -> str:
        beat, since = self.beat, time.strftime("%H:%M:%S", time.localtime(self.beat.since))
        what = f"{beat.phase}, after step {beat.step}, epoch {beat.epoch + 1}"
        if self.silent_for is not None:
            state = f"is silent for {self.silent_for:.0f} s: stopped, dead, or cut off from the network"
            return f"rank {self.rank} on {self.host} {state}" + (f". Last heard of in: {what}" if beat.phase else "")
        text = f"rank {self.rank} on {self.host} has made no progress since {since} ({beat.idle:.0f} s), in: {what}"
        text += f", in {self.place}" if self.place else ""
        return text + (f". Its collectives under way: {beat.collectives}" if beat.collectives else "")


def rank_at_fault_from_dict(content: Message) -> RankAtFault:
    """Returns the description of a rank that was sent as `asdict` gives it."""
    return RankAtFault(**{**content, "beat": heartbeat_from_dict(content["beat"])})


@dataclass(frozen=True)
class Verdict:
    """Names the ranks at fault, and what the others do meanwhile."""

    at_fault: list[RankAtFault]
    waiting: str = ""
    network: str = ""
    """The packets that get lost between the hosts, in a sentence, if that is the cause."""

    def brief(self) -> "Verdict":
        """Returns the verdict in a form that fits one short packet."""
        first = self.at_fault[0]
        return Verdict([RankAtFault(first.rank, first.host, first.beat, first.silent_for)], network=self.network)

    def to_dict(self) -> Message:
        """Returns the verdict as it is sent to the other ranks, with the stacks of the first ranks only."""
        shown = [culprit if at < SHOWN else replace(culprit, stacks="") for at, culprit in enumerate(self.at_fault[:20])]
        return {"guilty": [asdict(culprit) for culprit in shown], "waiting": self.waiting, "network": self.network}

    @property
    def silent(self) -> set[int]:
        """Returns the ranks at fault that send no messages."""
        return {culprit.rank for culprit in self.at_fault if culprit.silent_for is not None}

    def __str__(self) -> str:
        several = "ranks wait for each other: " if len(self.at_fault) > 1 and not self.silent else ""
        lines = [f"The run hangs: {several}{self.at_fault[0]}."]
        lines += [f"And: {culprit}." for culprit in self.at_fault[1:SHOWN]]
        if (more := len(self.at_fault) - SHOWN) > 0:
            lines.append(f"And {more} more in the same place.")
        if not self.silent and (finding := flights.describe_stall([culprit.beat for culprit in self.at_fault])):
            lines.append(f"{finding}.")
        if self.network:
            lines.append(f"{self.network}.")
        if self.waiting:
            lines.append(f"Waiting for it: {self.waiting}.")
        for culprit in self.at_fault[:SHOWN]:
            if culprit.stacks:
                lines.append(f"The stacks of rank {culprit.rank} on {culprit.host}:")
                lines.append(culprit.stacks)
        return "\n".join(lines)

    @property
    def hint(self) -> str:
        """Returns what the user can check, in a sentence."""
        first = self.at_fault[0]
        if self.network:
            return reachability.HINT
        if first.silent_for is not None:
            return f"see whether {first.host} is up and reachable, and whether the process was stopped (SIGSTOP)."
        if (flight := flights.shared_collective([first.beat])) and flight.stage == Flight.SCHEDULED:
            return f"see dmesg (NVRM, Xid) and nvidia-smi on {first.host}: a GPU that hangs needs a reset, or another host."
        if flights.describe_stall([culprit.beat for culprit in self.at_fault]):
            return "see the network between them (NCCL_DEBUG=INFO, and python -m project doctor), and their GPUs."
        if first.beat.phase == "start-up" and first.beat.collective:
            return "other ranks did not come: see whether they were started, and whether they can reach MASTER_ADDR."
        waits = first.beat.collective or first.beat.collectives
        is_after_steps = waits and re.match("validation|end of the", first.beat.phase)
        if is_after_steps and re.search("in: (forward|backward)", self.waiting):  # which have not come to that collective
            return (
                "some ranks have left the epoch's steps and others have not. A rank's own loss must not decide it alone "
                "(trainer.should_stop): use self.trainer.strategy.reduce_boolean_decision(...); nor loaders of other lengths."
            )
        if "data" in first.beat.phase:
            return "see what the dataset reads, and whether the file system answers; if it is only slow, set watchdog.at_least."
        return "if it is only slow, set watchdog.at_least, watchdog.factor or, for what is done once, watchdog.startup."


def verdict_from_dict(content: Message) -> Verdict:
    return Verdict([rank_at_fault_from_dict(entry) for entry in content["guilty"]], content["waiting"], content["network"])


def describe_phases(heartbeats: Iterable[tuple[Member, Heartbeat]]) -> str:
    """Returns which phases the ranks that are not at fault are in, in a few words."""
    phases: dict[str, list[Member]] = defaultdict(list)
    for member, beat in heartbeats:
        phases[beat.phase].append(member)
    return "; ".join(
        f"rank {first.rank} on {first.host}{f' and {len(more)} more' if more else ''} in: {phase}"
        for phase, (first, *more) in phases.items()
    )


# The report ----------------------------------------------------------------------------------------------------------


def report_and_exit(judged: Verdict, context: RankContext) -> None:
    """Writes and logs the verdict, and ends this process and those at fault on this host."""
    reports, unresponsive = context.is_reporter(judged.silent), _silent_on_this_host(judged, context)
    own = RankAtFault(context.me.rank, context.me.host, context.beat).with_stacks(context.me.dump)
    if reports:
        judged = replace(judged, at_fault=[_with_dump(culprit, unresponsive.get(culprit.rank)) for culprit in judged.at_fault])
    if context.folder is not None:
        folder = context.folder
        written = [own, *(culprit for culprit in judged.at_fault if reports and culprit.rank in unresponsive)]
        run_with_timeout(_PATIENCE, lambda: _write_stacks(folder, judged, written))
    if reports:
        where = f"\nThe stacks of all ranks: {context.folder}/hang-rank*.txt" if context.folder else ""
        again = f"All ranks end, with exit code {TRY_AGAIN}. {resumption(None)}"
        text = f"{judged}{where}\n{again} HINT: {judged.hint}"
        run_with_timeout(_PATIENCE, lambda: log.error(text))
        run_with_timeout(_PATIENCE, lambda: tell_torchrun(f"{judged.at_fault[0]}"))
    run_with_timeout(_PATIENCE, flush)
    run_with_timeout(_PATIENCE, lambda: tell_supervisor(reason=f"{judged.at_fault[0]}."))
    exit_process(context, TRY_AGAIN, list(unresponsive.values()), _AGENT if reports else None)


def _silent_on_this_host(judged: Verdict, context: RankContext) -> dict[int, Member]:
    """Returns the silent ranks on this host, whose processes can't end themselves."""
    return {
        member.rank: member
        for member in context.members
        if member.rank in judged.silent and member.machine == context.me.machine and member.started == start_time(member.pid)
    }


def _with_dump(culprit: RankAtFault, member: Member | None) -> RankAtFault:
    """Returns a rank at fault with its stacks, which this process makes it dump; unchanged if it is on another host (None)."""
    if member is None or culprit.stacks:
        return culprit
    return replace(culprit, stacks=read_dump(member.pid, member.dump, wake=True)[:_LONGEST])


def _write_stacks(folder: Path, judged: Verdict, ranks: list[RankAtFault]) -> None:
    """Writes the verdict and the stacks of some ranks, and the collectives of this one, into the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for culprit in ranks:
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{judged.at_fault[0]}.\n\nThis rank: {culprit}.\n\n"
        write_text(folder / f"hang-rank{culprit.rank}.txt", f"{head}{culprit.stacks}\n")
    if entries := flights.read_recorder():
        write_text(folder / f"hang-rank{ranks[0].rank}-collectives.json", json.dumps(entries))
