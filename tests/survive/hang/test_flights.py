"""Which rank is named, by what torch's flight recorder says on each: real dumps of gloo, and dumps in NCCL's format.

No GPU was there: NCCL's dumps are written by hand, after torch's sources (FlightRecorder.hpp, version 2.10 of the format).
"""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from project.survive.hang import flights
from project.survive.hang.heartbeats import Flight, Heartbeat, Member, unpacked
from project.survive.hang.verdict import Guilty, Verdict
from project.survive.hang.watchdog import Watchdog

Dump = list[dict[str, Any]]

GLOO: list[Dump] = json.loads((Path(__file__).parent / "dumps/gloo_rank_1_hangs.json").read_text())
"""Three ranks that train; rank 1 hangs within the third backward pass, and the others wait for its gradients there."""


def collective(number: int, state: str, name: str = "nccl:all_reduce", **other: Any) -> dict[str, Any]:
    """An entry as NCCL's recorder writes it."""
    entry = {
        **{"record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number},
        **{"p2p_seq_id": 0, "op_id": number, "profiling_name": name, "time_created_ns": 1795443900 * 10**9},
        **{"input_sizes": [[1024]], "input_dtypes": ["Float"], "output_sizes": [[1024]], "output_dtypes": ["Float"]},
        **{"state": state, "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0},
        **{"retired": state == "completed", "timeout_ms": 600000, "is_p2p": False},
    }
    return {**entry, **other}


def nccl(last: int, state: str = "completed", **other: Any) -> Dump:
    """A rank's collectives up to `last`, which is in this state; what comes before has completed."""
    return [*(collective(number, "completed") for number in range(1, last)), collective(last, state, **other)]


DEVICE = [nccl(17, "started"), nccl(17, "started"), nccl(17, "scheduled"), nccl(17, "started")]
HOST = [nccl(17, "started"), nccl(16), nccl(17, "started"), nccl(17, "started")]
NETWORK = [nccl(17, "started") for _ in range(4)]


def beat(monkeypatch: pytest.MonkeyPatch, rank: int, dump: Dump, at: tuple[int, int, int] = (9, 0, 2)) -> Heartbeat:
    """Of a rank whose main thread waits where no frame is one of torch.distributed: here, in this test."""
    monkeypatch.setattr(flights, "record", lambda: dump)
    watchdog = Watchdog(at_least=5.0)
    watchdog._trainer = SimpleNamespace(global_rank=rank, global_step=8, current_epoch=0)
    watchdog._now = ("backward and gradient sync", time.monotonic() - 2 * watchdog.startup, at)
    sent = json.dumps(watchdog._beat().__dict__, default=lambda flight: flight.__dict__)
    return unpacked(json.loads(sent))


class Net:
    """What rank 0 hears when it asks: each rank testifies."""

    def __init__(self, beats: list[Heartbeat]) -> None:
        self.members = [Member(rank, f"h{rank}", "the same machine", 1, "1", ("", 0), "") for rank in range(len(beats))]
        self._beats, self._asked = beats, list[int]()

    def send(self, to: int, kind: str, **_: Any) -> None:
        assert kind == "testify"
        self._asked.append(to)

    def receive(self, seconds: float) -> Iterator[dict[str, Any]]:
        for rank in self._asked:
            yield {"kind": "testimony", "guilty": Guilty(rank, f"h{rank}", self._beats[rank]).packed()}
        self._asked.clear()


def judged(monkeypatch: pytest.MonkeyPatch, beats: list[Heartbeat]) -> Verdict | None:
    watchdog: Any = Watchdog(at_least=5.0)
    watchdog._trainer = SimpleNamespace(global_rank=0)
    watchdog._channel = Net(beats)
    watchdog._heard = {rank: (time.monotonic(), one) for rank, one in enumerate(beats)}
    watchdog._judge(time.monotonic())
    found: Verdict | None = watchdog._verdict
    return found


def verdict_of(monkeypatch: pytest.MonkeyPatch, dumps: list[Dump]) -> Verdict:
    found = judged(monkeypatch, [beat(monkeypatch, rank, dump) for rank, dump in enumerate(dumps)])
    assert found is not None
    return found


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_rank_whose_device_hangs_in_what_it_computes_is_named_alone(monkeypatch, ranks):
    found = verdict_of(monkeypatch, DEVICE[:ranks])
    assert [one.rank for one in found.guilty] == [2]
    text = str(found)
    assert "Its device has not got to nccl:all_reduce number 17 of [[1024]]: it hangs in what it computes before." in text
    assert f"Waiting for it: rank 0 on h0 and {ranks - 2} more in: " in text
    assert "see dmesg (NVRM, Xid) and nvidia-smi on h2" in found.hint


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_rank_whose_host_hangs_before_it_asks_is_named_alone(monkeypatch, ranks):
    found = verdict_of(monkeypatch, HOST[:ranks])
    assert [one.rank for one in found.guilty] == [1]
    assert "does not end" not in str(found)


@pytest.mark.parametrize("ranks", [3, 4])
def test_where_all_are_in_the_same_collective_nobody_is_singled_out(monkeypatch, ranks):
    found = verdict_of(monkeypatch, NETWORK[:ranks])
    assert [one.rank for one in found.guilty] == list(range(ranks))
    assert "All of them are in nccl:all_reduce number 17 of [[1024]], and it does not end." in str(found)
    assert "the network between them" in found.hint


def test_a_device_that_does_not_get_out_of_a_collective_is_behind_those_that_did(monkeypatch):
    dumps = [nccl(17, "started"), nccl(17, "started"), nccl(16, "started")]
    assert [one.rank for one in verdict_of(monkeypatch, dumps).guilty] == [2]


def test_gloo_tells_as_well_by_real_dumps(monkeypatch):
    assert [one.rank for one in verdict_of(monkeypatch, GLOO).guilty] == [1]
    one, two, three = (flights.flight(dump) for dump in GLOO)
    assert one == three == Flight(8, Flight.STARTED, "gloo:all_reduce number 8 of [[36]]")
    assert two == Flight(8, Flight.ABSENT)


def test_how_far_a_host_has_run_ahead_does_not_matter(monkeypatch):
    """Rank 0 waits for its device at an earlier place than the others, where it logs something."""
    places = [(9, 0, 1), (9, 0, 3), (10, 0, 0), (9, 0, 3)]
    beats = [beat(monkeypatch, rank, dump, places[rank]) for rank, dump in enumerate(DEVICE)]
    found = judged(monkeypatch, beats)
    assert found is not None
    assert [one.rank for one in found.guilty] == [2]


def test_two_collectives_that_do_not_fit_are_told_apart_by_how_far_the_hosts_are(monkeypatch):
    dumps = [nccl(17, "started"), nccl(17, "started", name="nccl:barrier")]
    beats = [beat(monkeypatch, 0, dumps[0], (9, 0, 2)), beat(monkeypatch, 1, dumps[1], (9, 0, 1))]
    found = judged(monkeypatch, beats)
    assert found is not None
    assert [one.rank for one in found.guilty] == [1]


def test_nobody_is_judged_before_all_have_said_how_far_they_are(monkeypatch):
    moves = Heartbeat((9, 0, 3), "forward", 8, 0, time.time(), 1.0, 5.0, 5.0)
    assert judged(monkeypatch, [beat(monkeypatch, 0, DEVICE[0]), beat(monkeypatch, 1, DEVICE[1]), moves]) is None


def test_what_is_no_collective_of_all_ranks_does_not_count():
    side = collective(99, "started", process_group=["1", "undefined"])
    sent = collective(98, "started", is_p2p=True)
    beside = collective(97, "scheduled", name="gloo:all_reduce")
    assert flights.flight([*nccl(17, "started"), side, sent, beside]) == flights.flight(nccl(17, "started"))


def test_a_part_of_an_earlier_one_that_is_never_seen_to_complete_does_not_count():
    dump = [*nccl(15), collective(16, "scheduled"), collective(17, "completed"), collective(18, "started")]
    found = flights.flight(dump)
    assert found is not None
    assert found.place == (18, Flight.STARTED)
    parts = [*nccl(15), collective(16, "scheduled"), collective(16, "started", name="nccl:coalesced")]
    found = flights.flight(parts)
    assert found is not None
    assert found.place == (16, Flight.STARTED)


def test_without_a_record_nothing_is_known():
    assert flights.flight([]) is None


def test_a_recorder_that_does_not_answer_keeps_nobody(monkeypatch):
    """Another thread may hold its lock for ever."""
    asked: list[int] = []
    never = threading.Event()

    def locked() -> Dump:
        asked.append(1)
        never.wait()
        return []

    monkeypatch.setattr(flights, "record", locked)
    monkeypatch.setattr(flights, "_PATIENCE", 0.1)
    monkeypatch.setattr(flights, "_asking", [])
    began = time.monotonic()
    assert [flights.recorded() for _ in range(5)] == [[]] * 5
    never.set()
    assert time.monotonic() - began < 1
    assert len(asked) == 1  # and it is not asked again meanwhile


def test_nccl_notes_when_a_collective_starts_and_what_the_user_has_set_stays(monkeypatch):
    name = "TORCH_NCCL_ENABLE_TIMING"
    monkeypatch.setenv(name, "0")
    flights.prepare(torch.device("cuda", 0))
    assert flights.os.environ[name] == "0"
    monkeypatch.delenv(name)
    flights.prepare(torch.device("cpu"))
    assert name not in flights.os.environ
    flights.prepare(torch.device("cuda", 0))
    assert flights.os.environ.pop(name) == "1"
