"""Finds the rank that the others wait for, by torch's flight recorder, which knows how far each rank's collectives are.

Under NCCL the stacks do not show it. All hosts wait for their devices at the same place, whether a device waits in a collective
for the others or is the one that never got there. The recorder has three states: *scheduled*, the host has asked for the
collective; *started*, the device has got to it; *completed*. Gloo's collectives have no device to wait for: they start at once.
The library that torch 2.15 calls nccl2 never records *started*: it can't distinguish ranks that are in the same collective.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence

from project.step.flight_recorder import Collective, ranks_of, recorded_collectives
from project.survive.hang.heartbeats import Flight, Heartbeat
from project.survive.hang.leaving import run_with_timeout

_PATIENCE = 2.0  # seconds for the recorder, whose lock another thread may hold for ever
_readers: list[threading.Thread] = []


def read_recorder() -> list[Collective]:
    """Returns the recorder's entries, or none where it does not answer soon: a thread reads them, since that queries CUDA's
    events.
    """
    if _readers and _readers[-1].is_alive():
        return []
    entries: list[Collective] = []
    _readers[:] = [run_with_timeout(_PATIENCE, lambda: entries.extend(recorded_collectives()))]
    return [] if _readers[0].is_alive() else entries


def progress_by_group(entries: Iterable[Collective]) -> dict[str, Flight]:
    """Returns how far the collectives of each group are, by the group's name; groups without any are left out."""
    of_groups: dict[str, list[Collective]] = {}
    for entry in entries:
        name, description = entry["process_group"]
        if not entry["is_p2p"]:
            of_groups.setdefault(ALL if description == ALL else name, []).append(entry)
    members = {name: () if name == ALL else ranks_of(name) for name in of_groups}
    return {name: _progress_in_group(those, members[name]) for name, those in of_groups.items() if name == ALL or members[name]}


def _progress_in_group(entries: Sequence[Collective], ranks: tuple[int, ...]) -> Flight:
    """Returns the oldest collective that has not ended on this rank; or, where all have, the next that it will be asked for."""
    nccl = [entry for entry in entries if entry["profiling_name"].startswith("nccl")]
    stages: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in nccl or entries:
        number = entry["collective_seq_id"]
        stages[number] = max(stages.get(number, Flight.ABSENT), _stage_of(entry))
        names[number] = f"{entry['profiling_name']} number {number} of {entry['input_sizes']}"
    # One NCCL collective comes after the other: what was recorded as a part of another may never be seen to complete.
    # Gloo has several threads, and so the next may be done before the last.
    done = max((number for number, stage in stages.items() if nccl and stage == _COMPLETED), default=-1)
    open_ones = [number for number, stage in stages.items() if number > done and stage != _COMPLETED]
    if not open_ones:
        return Flight(max(stages) + 1, Flight.ABSENT, ranks=ranks)
    return Flight(min(open_ones), stages[min(open_ones)], names[min(open_ones)], ranks)


ALL = "default_pg"
"""torch's description of the group of all ranks."""
_COMPLETED = Flight.STARTED + 1


def _stage_of(entry: Collective) -> int:
    """Returns how far a collective is, as one of the stages of a Flight or _COMPLETED."""
    if entry["profiling_name"].startswith("gloo:"):  # it stays 'scheduled' to its end
        return _COMPLETED if entry["retired"] else Flight.STARTED
    return {"started": Flight.STARTED, "completed": _COMPLETED}.get(entry["state"], Flight.SCHEDULED)


def awaits_reports(beats: Iterable[Heartbeat]) -> bool:
    """Returns whether a rank that still moves, or has only just stopped, has yet to report how far its collectives are. False
    where no rank has reported any.
    """
    reported = list(beats)
    return any(beat.flights for beat in reported) and any(not beat.flights and not beat.waits_too_long for beat in reported)


def ranks_behind(beats: Mapping[int, Heartbeat]) -> list[int]:
    """Returns the ranks that the others wait for: those that are furthest behind in what all ranks do together, and of these
    the ones that wait for nobody in another group. (A host may be ahead in a group of its own while its device hangs.)
    Never empty: where ranks report no collectives, it goes by their position within the hooks.
    """
    ranks, known = sorted(beats), [flight for beat in beats.values() if (flight := beat.flights.get(ALL))]
    if len(known) == len(ranks):
        if len(set(known)) == 1 and known[0].stage == Flight.STARTED:
            return ranks  # all are in the same one, and it does not end
        last = min(flight.order for flight in known)
        ranks = [rank for rank in ranks if beats[rank].flights[ALL].order == last]
    waits = {rank: _waits_for(rank, beats) & {*ranks} for rank in ranks}
    if awaited := {other for others in waits.values() for other in others}:
        # Where each waits for another, they are in a circle: groups were entered in another order.
        ranks = sorted(rank for rank in awaited if not waits[rank]) or sorted(awaited)
    at = min(beats[rank].at for rank in ranks)
    ranks = [rank for rank in ranks if beats[rank].at == at]
    # In the same hook, those that are in a collective wait for those that are not.
    return [rank for rank in ranks if not beats[rank].collective] or ranks


def _waits_for(rank: int, beats: Mapping[int, Heartbeat]) -> set[int]:
    """Returns the ranks that have not got as far in a collective as this one, which is in it."""
    others: set[int] = set()
    for group, flight in beats[rank].flights.items():
        if flight.stage != Flight.ABSENT:
            members = [other for other in flight.ranks or beats if other in beats and beats[other].flights]
            others |= {other for other in members if beats[other].flights.get(group, _NONE).order < flight.order}
    return others


_NONE = Flight(-1, Flight.ABSENT)  # of a group of which a rank has recorded nothing


def shared_collective(beats: Sequence[Heartbeat]) -> Flight | None:
    """Returns the collective in which all of these ranks are; None if they differ."""
    for group, flight in sorted(beats[0].flights.items(), key=lambda item: -item[1].stage):
        if flight.name and all(beat.flights.get(group) == flight for beat in beats):
            return flight
    return None


def describe_stall(beats: Sequence[Heartbeat]) -> str:
    """Returns what the collectives of the ranks at fault show, in a sentence, or ''."""
    first = shared_collective(beats)
    if first is None:
        return ""
    if first.stage == Flight.SCHEDULED:
        return f"Its device has not got to {first.name}: it hangs in what it computes before"
    if first.stage == Flight.STARTED and len(beats) > 1:
        return f"All of them are in {first.name}, and it does not end"
    return ""
