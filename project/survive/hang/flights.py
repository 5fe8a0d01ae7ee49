"""Which rank do the others wait for, by torch's flight recorder: it knows how far each rank's collectives are.

Under NCCL the stacks do not tell. All hosts wait for their devices at the same place, whether a device waits in a collective
for the others or is the one that never got there. The recorder has three states: *scheduled*, the host has asked for the
collective; *started*, the device has got to it; *completed*. Gloo's collectives have no device to wait for: they start at once.
The library that torch 2.15 calls nccl2 never says *started*: ranks that are in the same collective can't be told apart by it.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from project.survive.hang.heartbeats import Flight, Heartbeat
from project.survive.hang.leaving import within
from project.train.flight_recorder import record

_PATIENCE = 2.0  # seconds for the recorder, whose lock another thread may hold for ever
_asking: list[threading.Thread] = []


def recorded() -> list[dict[str, Any]]:
    """The recorder's entries, or none where it does not answer soon: asked in a thread, as it looks at CUDA's events."""
    if _asking and _asking[-1].is_alive():
        return []
    found: list[dict[str, Any]] = []
    _asking[:] = [within(_PATIENCE, lambda: found.extend(record()))]
    return [] if _asking[0].is_alive() else found


def flight(entries: Iterable[Mapping[str, Any]]) -> Flight | None:
    """The oldest collective of all ranks that has not ended on this one; or, where all have, the next that it will be asked
    for. None: nothing was recorded."""
    of_all = [one for one in entries if one["process_group"][1] == "default_pg" and not one["is_p2p"]]
    nccl = [one for one in of_all if one["profiling_name"].startswith("nccl")]
    stages: dict[int, int] = {}
    names: dict[int, str] = {}
    for one in nccl or of_all:
        number = one["collective_seq_id"]
        stages[number] = max(stages.get(number, Flight.ABSENT), _stage(one))
        names[number] = f"{one['profiling_name']} number {number} of {one['input_sizes']}"
    if not stages:
        return None
    # One NCCL collective comes after the other: what was recorded as a part of another may never be seen to complete.
    # Gloo has several threads, and so the next may be done before the last.
    done = max((number for number, stage in stages.items() if nccl and stage == _COMPLETED), default=-1)
    open_ones = [number for number, stage in stages.items() if number > done and stage != _COMPLETED]
    if not open_ones:
        return Flight(max(stages) + 1, Flight.ABSENT)
    return Flight(min(open_ones), stages[min(open_ones)], names[min(open_ones)])


_COMPLETED = Flight.STARTED + 1


def _stage(entry: Mapping[str, Any]) -> int:
    if entry["profiling_name"].startswith("gloo:"):  # it stays 'scheduled' to its end
        return _COMPLETED if entry["retired"] else Flight.STARTED
    return {"started": Flight.STARTED, "completed": _COMPLETED}.get(entry["state"], Flight.SCHEDULED)


def undecided(beats: Iterable[Heartbeat]) -> bool:
    """Whether a rank that still moves, or has only just stopped, has yet to say how far its collectives are."""
    known = list(beats)
    return any(beat.flight for beat in known) and any(not beat.flight and not beat.waits for beat in known)


def behind(beats: Mapping[int, Heartbeat]) -> list[int]:
    """The ranks that the others wait for: those that are furthest behind."""
    ranks, flights = sorted(beats), [beat.flight for beat in beats.values()]
    known = [one for one in flights if one is not None]
    if len(known) == len(flights):
        if len(set(known)) == 1 and known[0].stage == Flight.STARTED:
            return ranks  # all are in the same one, and it does not end
        last = min(one.place for one in known)
        ranks = [rank for rank in ranks if (one := beats[rank].flight) and one.place == last]
    at = min(beats[rank].at for rank in ranks)
    ranks = [rank for rank in ranks if beats[rank].at == at]
    # In the same hook, those that are in a collective wait for those that are not.
    return [rank for rank in ranks if not beats[rank].collective] or ranks


def said(beats: Sequence[Heartbeat]) -> str:
    """What the collectives of the ranks at fault say, in a sentence, or ''."""
    first = beats[0].flight
    if first is None or not first.name or any(beat.flight != first for beat in beats):
        return ""
    if first.stage == Flight.SCHEDULED:
        return f"Its device has not got to {first.name}: it hangs in what it computes before"
    if first.stage == Flight.STARTED and len(beats) > 1:
        return f"All of them are in {first.name}, and it does not end"
    return ""
