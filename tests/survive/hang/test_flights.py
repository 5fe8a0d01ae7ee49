"""Names the rank that hangs, by what torch's flight recorder says on each: dumps of real gloo ranks."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from project.cluster.signed import sealer
from project.survive.hang import flights
from project.survive.hang.heartbeats import Flight, Heartbeat, Member, heartbeat_from_dict
from project.survive.hang.verdict import RankAtFault, Verdict, verdict_on
from project.survive.hang.watchdog import Watchdog, _report_processes
from project.watch.console import _Formatter
from tests.conftest import environment, forked

Dump = list[dict[str, Any]]

GLOO: list[Dump] = json.loads((Path(__file__).parent / "dumps/gloo_rank_1_hangs.json").read_text())
"""Three ranks that train; rank 1 hangs within the third backward pass, and the others wait for its gradients there."""


def beat(monkeypatch: pytest.MonkeyPatch, rank: int, dump: Dump, at: tuple[int, int, int] = (9, 0, 2)) -> Heartbeat:
    """Of a rank whose main thread waits where no frame is one of torch.distributed: here, in this test."""
    monkeypatch.setattr(flights, "recorded_collectives", lambda: dump)
    watchdog = Watchdog(at_least=5.0, startup=10.0)
    watchdog._trainer = SimpleNamespace(global_rank=rank, global_step=8, current_epoch=0)
    watchdog._progress = ("backward and gradient sync", time.monotonic() - 2 * watchdog.startup, at)
    sent = json.dumps(watchdog._heartbeat().__dict__, default=vars)
    return heartbeat_from_dict(json.loads(sent))


class Net:
    """What rank 0 hears when it asks: each rank testifies."""

    def __init__(self, beats: list[Heartbeat]) -> None:
        self.members = [Member(rank, f"h{rank}", "the same machine", 1, "1", ("", 0), "") for rank in range(len(beats))]
        self._queried = list[int]()

    def send(self, to: int, kind: str, **_: Any) -> None:
        assert kind == "testify"
        self._queried.append(to)

    def receive(self, seconds: float) -> Iterator[dict[str, Any]]:
        for rank in self._queried:
            yield {"kind": "testimony", "rank": rank, "place": "", "stacks": ""}
        self._queried.clear()


def judged(monkeypatch: pytest.MonkeyPatch, beats: list[Heartbeat]) -> Verdict | None:
    watchdog: Any = Watchdog(at_least=5.0)
    watchdog._trainer = SimpleNamespace(global_rank=0)
    watchdog._channel = Net(beats)
    watchdog._heartbeats = {rank: (time.monotonic(), heartbeat) for rank, heartbeat in enumerate(beats)}
    watchdog._judge(time.monotonic())
    verdict: Verdict | None = watchdog._verdict
    return verdict


def test_the_rank_that_the_others_wait_for_is_named(monkeypatch):
    verdict = judged(monkeypatch, [beat(monkeypatch, rank, dump) for rank, dump in enumerate(GLOO)])
    assert verdict is not None
    assert verdict.text.startswith("The run hangs: rank 1 on h1 has made no progress ")
    assert "\nAnd" not in verdict.text
    first, second, third = (flights.progress_by_group(dump)[flights.ALL] for dump in GLOO)
    assert first == third == Flight(8, Flight.STARTED, "gloo:all_reduce number 8 of [[36]]")
    assert second == Flight(8, Flight.ABSENT)


def test_a_rank_is_named_that_has_not_entered_a_collective_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 2 and 3 wait in groups in which rank 1 is not, or for a rank that waits itself."""
    run = forked(tmp_path, ranks=4, program="tests.survive.hang.groups:main")
    assert run.code == 0, run.output
    beats = [heartbeat_from_dict(json.loads((tmp_path / f"beat-{rank}.json").read_text())) for rank in range(4)]
    verdict = judged(monkeypatch, beats)
    assert verdict is not None
    assert verdict.text.startswith("The run hangs: rank 1 on h1 has made no progress ")
    assert "\nAnd" not in verdict.text


def test_the_line_of_the_processes_names_16_on_a_terminal_and_all_in_the_file(caplog):
    ranks = [Member(rank, f"h{rank // 8}", "a machine", 100 + rank, "1", ("", 0), "") for rank in range(64)]
    caplog.set_level(logging.INFO)
    for count in (2, 16, 64):
        _report_processes(ranks[:count])
    two, sixteen, sixty_four = caplog.records
    assert two.getMessage().startswith("Processes: rank 0 is 100 on h0, rank 1 is 101 on h0; ")
    assert "rank 15 is 115 on h1; " in sixteen.getMessage()
    assert "rank 15 is 115 on h1 and 48 more; " in sixty_four.getMessage()
    assert "rank 15 is 115 on h1, rank 16 is 116 on h2, " in (text := _Formatter(whole=True).format(sixty_four))
    assert "rank 63 is 163 on h7; " in text


def test_nobody_is_judged_before_all_have_said_how_far_they_are(monkeypatch):
    moves = Heartbeat((9, 0, 3), "forward", 8, 0, time.time(), 1.0, 5.0, 5.0)
    assert judged(monkeypatch, [beat(monkeypatch, 0, GLOO[0]), beat(monkeypatch, 1, GLOO[1]), moves]) is None


def test_without_a_record_nothing_is_known():
    assert flights.progress_by_group([]) == {}


def test_a_recorder_that_does_not_answer_keeps_nobody(monkeypatch):
    """Another thread may hold its lock for ever."""
    calls: list[int] = []
    never = threading.Event()

    def locked() -> Dump:
        calls.append(1)
        never.wait()
        return []

    monkeypatch.setattr(flights, "recorded_collectives", locked)
    monkeypatch.setattr(flights, "_PATIENCE", 0.1)
    monkeypatch.setattr(flights, "_readers", [])
    began = time.monotonic()
    assert [flights.read_recorder() for _ in range(5)] == [[]] * 5
    never.set()
    assert time.monotonic() - began < 1
    assert len(calls) == 1  # and it is not asked again meanwhile


@pytest.mark.parametrize(
    ("imports", "given", "taken"),
    [("project", {}, "0"), ("torch.distributed, project", {}, "0"), ("project", {"TORCH_DIST_USE_NCCL2": "1"}, "1")],
)
def test_the_nccl_whose_recorder_tells_who_hangs_is_taken_unless_another_is_in_use(imports, given, taken):
    program = f"import {imports}, os; print(os.environ['TORCH_DIST_USE_NCCL2'], os.environ['TORCH_NCCL_ENABLE_TIMING'])"
    clean = {name: value for name, value in environment(**given).items() if name in given or not name.startswith("TORCH_")}
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [taken, "1"]


def test_ranks_that_have_parted_are_told_so(monkeypatch):
    """A rank of which the loss alone has ended the epoch validates, and the others compute."""
    at = replace(beat(monkeypatch, 0, []), phase="validation, data")
    reduces = replace(at, flights={flights.ALL: Flight(7, Flight.STARTED, "gloo:all_reduce number 7")})
    validates = RankAtFault(0, "h1", reduces)
    assert "trainer.should_stop" in verdict_on([validates], waiting="rank 1 on h2 in: forward").hint
    for at_fault, where in (validates, "validation"), (RankAtFault(0, "h1", at), "forward"):
        assert "what the dataset reads" in verdict_on([at_fault], waiting=f"rank 1 on h2 in: {where}").hint


def test_a_verdict_on_long_packets_that_get_lost_fits_a_short_one(monkeypatch):
    at_fault = RankAtFault(1, "h2", beat(monkeypatch, 1, GLOO[1]), place="sit_and_wait (train.py:7)", stacks="  File " * 999)
    verdict = verdict_on([at_fault], "rank 0 on h1 in: forward", "Packets of 1,500 bytes get lost between h1 and h2")
    assert "Packets of 1,500 bytes" in verdict.text
    assert len(sealer("00" * 32)({"kind": "hang", "verdict": asdict(verdict)})) < 500
