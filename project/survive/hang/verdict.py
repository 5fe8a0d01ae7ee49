"""Ends a run that hangs: names who is at fault and where, writes the stacks of all ranks to the run's folder, and exits.

One rank on each host reports; the others write. Nothing here waits for anything for long: a disk or a terminal may be what
hangs.
"""

import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from project.cluster import reachability
from project.cluster.processes import read_dump, start_time
from project.errors import TRY_AGAIN
from project.launch.fork_server import tell_supervisor
from project.survive.failure import resumption, tell_torchrun
from project.survive.hang import flights, stacks
from project.survive.hang.heartbeats import Flight, Heartbeat, Member
from project.survive.hang.leaving import RankContext, exit_process, flush, run_with_timeout
from project.untrusted import write_text

log = logging.getLogger(__name__)

SHOWN = 2  # ranks whose stacks are part of the message
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

    def __str__(self) -> str:
        beat, since = self.beat, time.strftime("%H:%M:%S", time.localtime(self.beat.since))
        what = f"{beat.phase}, after step {beat.step}, epoch {beat.epoch + 1}"
        if self.silent_for is not None:
            state = f"is silent for {self.silent_for:.0f} s: stopped, dead, or cut off from the network"
            return f"rank {self.rank} on {self.host} {state}" + (f". Last heard of in: {what}" if beat.phase else "")
        text = f"rank {self.rank} on {self.host} has made no progress since {since} ({beat.idle:.0f} s), in: {what}"
        text += f", in {self.place}" if self.place else ""
        return text + (f". Its collectives under way: {beat.collectives}" if beat.collectives else "")


@dataclass(frozen=True)
class Verdict:
    """Describes a hang as all ranks are told of it."""

    text: str
    """Who is at fault, with the stacks, and what the others do meanwhile."""
    first: str
    """The first rank at fault, with its state."""
    place: str
    """The call that its main thread is in."""
    hint: str
    silent: list[int]
    """The ranks at fault that send no messages."""


def verdict_on(at_fault: Sequence[RankAtFault], waiting: str = "", network: str = "") -> Verdict:
    """Returns the verdict on the ranks at fault.

    Args:
        at_fault: these ranks.
        waiting: what the others do meanwhile.
        network: the packets that get lost between the hosts, in a sentence, if that is the cause; the text is short then.
    """
    if network:
        at_fault, waiting = [replace(at_fault[0], place="", stacks="")], ""
    silent = [culprit.rank for culprit in at_fault if culprit.silent_for is not None]
    several = "ranks wait for each other: " if len(at_fault) > 1 and not silent else ""
    lines = [f"The run hangs: {several}{at_fault[0]}."]
    lines += [f"And: {culprit}." for culprit in at_fault[1:SHOWN]]
    if (more := len(at_fault) - SHOWN) > 0:
        lines.append(f"And {more} more in the same place.")
    if not silent and (finding := flights.describe_stall([culprit.beat for culprit in at_fault])):
        lines.append(f"{finding}.")
    if network:
        lines.append(f"{network}.")
    if waiting:
        lines.append(f"Waiting for it: {waiting}.")
    for culprit in at_fault[:SHOWN]:
        if culprit.stacks:
            lines.append(f"The stacks of rank {culprit.rank} on {culprit.host}:")
            lines.append(culprit.stacks)
    return Verdict("\n".join(lines), str(at_fault[0]), at_fault[0].place, _hint(at_fault, waiting, network), silent)


def _hint(at_fault: Sequence[RankAtFault], waiting: str, network: str) -> str:
    """Returns what the user can check, in a sentence."""
    first = at_fault[0]
    if network:
        return reachability.HINT
    if first.silent_for is not None:
        return f"see whether {first.host} is up and reachable, and whether the process was stopped (SIGSTOP)."
    if (flight := flights.shared_collective([first.beat])) and flight.stage == Flight.SCHEDULED:
        return f"see dmesg (NVRM, Xid) and nvidia-smi on {first.host}: a GPU that hangs needs a reset, or another host."
    if flights.describe_stall([culprit.beat for culprit in at_fault]):
        return "see the network between them (NCCL_DEBUG=INFO, and python -m project doctor), and their GPUs."
    if first.beat.phase == "start-up" and first.beat.collective:
        return "other ranks did not come: see whether they were started, and whether they can reach MASTER_ADDR."
    waits = first.beat.collective or first.beat.collectives
    is_after_steps = waits and re.match("validation|end of the", first.beat.phase)
    if is_after_steps and re.search("in: (forward|backward)", waiting):  # which have not come to that collective
        return (
            "some ranks have left the epoch's steps and others have not. A rank's own loss must not decide it alone "
            "(trainer.should_stop): use self.trainer.strategy.reduce_boolean_decision(...); nor loaders of other lengths."
        )
    if "data" in first.beat.phase:
        return "see what the dataset reads, and whether the file system answers; if it is only slow, set watchdog.at_least."
    return "if it is only slow, set watchdog.at_least, watchdog.factor or, for what is done once, watchdog.startup."


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
    own = RankAtFault(context.me.rank, context.me.host, context.beat, None, *stacks.own_stacks(context.me.dump))
    dumping = unresponsive if reports else []  # ranks that this process makes dump their stacks
    dumps = {member.rank: read_dump(member.pid, member.dump, wake=True)[: stacks.LONGEST] for member in dumping}
    if context.folder is not None:
        folder, texts = context.folder, {own.rank: f"This rank: {own}.\n\n{own.stacks}", **dumps}
        run_with_timeout(_PATIENCE, lambda: _write_stacks(folder, judged, texts))
    if reports:
        shown = "".join(f"\nThe stacks of rank {rank} on {own.host}:\n{dumps[rank]}" for rank in [*dumps][:SHOWN])
        where = f"\nThe stacks of all ranks: {context.folder}/hang-rank*.txt" if context.folder else ""
        again = f"All ranks end, with exit code {TRY_AGAIN}. {resumption(None)}"
        text = f"{judged.text}{shown}{where}\n{again} HINT: {judged.hint}"
        run_with_timeout(_PATIENCE, lambda: log.error(text))
        run_with_timeout(_PATIENCE, lambda: tell_torchrun(judged.first))
    run_with_timeout(_PATIENCE, flush)
    run_with_timeout(_PATIENCE, lambda: tell_supervisor(reason=f"{judged.first}."))
    exit_process(context, TRY_AGAIN, unresponsive, _AGENT if reports else None)


def _silent_on_this_host(judged: Verdict, context: RankContext) -> list[Member]:
    """Returns the silent ranks on this host, whose processes can't end themselves."""
    here = [member for member in context.members if member.machine == context.me.machine]
    return [member for member in here if member.rank in judged.silent and member.started == start_time(member.pid)]


def _write_stacks(folder: Path, judged: Verdict, texts: Mapping[int, str]) -> None:
    """Writes the verdict and the stacks of some ranks, this one first, and its collectives, into the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, text in texts.items():
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{judged.first}.\n\n"
        write_text(folder / f"hang-rank{rank}.txt", f"{head}{text}\n")
    if entries := flights.read_recorder():
        write_text(folder / f"hang-rank{next(iter(texts))}-collectives.json", json.dumps(entries))
