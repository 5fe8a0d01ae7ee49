"""Curves of long runs: what is left out of a million steps is not seen, and takes neither room nor time."""

import json
import math
import random
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from project.cli.watching import Look
from project.watch.curves import Curves
from project.watch.goodput import goodput
from project.watch.history import read_history
from project.watch.report import write
from tests.conftest import forked
from tests.hostile import framed

LEARNED = ("train/loss", "train/acc", "train/lr", "epoch")
SPEED = tuple(f"speed/{name}" for name in ("samples_per_s", "data_wait", "forward", "backward", "optimizer", "rest"))
STEPS = 400_000
"""Of a long run: of as many, all points would take much more memory than is allowed here."""
SPIKE, HOT = 123_456, 54_321
"""The steps of a loss that is large, and of one that is not finite."""


class Writer:
    """Writes events as `Events` does, a hundred times as fast: what differs between them is put into one that was made."""

    def __init__(self, *tags: str, origin: float = 1.7e9) -> None:
        self._origin = origin
        values = [Summary.Value(tag=tag, simple_value=0.0) for tag in tags]
        self._tail = bytearray(Event(summary=Summary(value=values)).SerializeToString())
        self._places, at = [], 0
        for value in values:
            at = self._tail.index(value.SerializeToString(), at) + len(value.SerializeToString())
            self._places.append(at - 4)
        self._heads: dict[int, bytes] = {}

    def __call__(self, step: int, *values: float) -> bytes:
        for place, value in zip(self._places, values, strict=True):
            struct.pack_into("<f", self._tail, place, value)
        record = struct.pack("<cdc", b"\x09", self._origin + step, b"\x10") + varint(step) + self._tail
        if len(record) not in self._heads:
            length = struct.pack("<Q", len(record))
            self._heads[len(record)] = length + struct.pack("<I", masked_crc32c(length))
        return self._heads[len(record)] + record + bytes(4)


def varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def write_run(folder: Path, steps: int) -> None:
    """Writes a run that has logged each of its steps, the norm of the gradient beside it, and its speed every 10 steps."""
    learned, norm, speed = Writer(*LEARNED), Writer("train/grad_norm"), Writer(*SPEED)
    with (folder / "events.out.tfevents.1.host.1.0").open("wb") as file:
        for step in range(1, steps + 1):
            loss = 50.0 if step == SPIKE else math.nan if step == HOT else 1 + 100 / step
            file.write(learned(step, loss, 1 - 1 / step, 0.1, step // 1000) + norm(step, 0.5))
            if not step % 10:
                file.write(speed(step, 1000 + step % 7, 0.1, 0.3, 0.4, 0.1, 0.1))
    lives = [
        {"event": "start", "time": 1.7e9, "step": 0, "ranks": 1, "hosts": {"host": 1}, "global_batch": 8},
        {"event": "stop", "time": 1.7e9 + steps, "step": steps, "state": "finished", "why": None},
    ]
    (folder / "life.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lives))


def peak_of_memory() -> Callable[[], float]:
    """Looks again and again: the highest figure of the system may be one of the process that forked this one."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    before, highest = resident(), [0.0]

    def sample() -> None:
        while True:
            highest[0] = max(highest[0], resident() - before)
            time.sleep(0.01)

    threading.Thread(target=sample, daemon=True).start()
    return lambda: highest[0]


def report() -> None:
    """Programs in a process of their own, which has loaded the libraries as rank 0 has at the end of a fit."""
    peak, began = peak_of_memory(), time.thread_time()  # without the thread that looks at the memory
    write(read_history(Path(), "it"))
    print(peak(), time.thread_time() - began)


def watch() -> None:
    peak, look = peak_of_memory(), Look(Path())
    look()
    began = time.thread_time()
    for _ in range(20):
        look()
    print(peak(), (time.thread_time() - began) / 20)


def measured(program: Callable[[], None], folder: Path) -> tuple[float, float]:
    """The memory that a program takes at its peak, in MiB, and the time of a processor."""
    done = forked(folder, program=f"{__name__}:{program.__name__}")
    assert done.code == 0, done.output
    megabytes, seconds = map(float, done.output.split())
    print(f"{megabytes:.0f} MiB, {seconds:.4f} s of a CPU")
    return megabytes, seconds


def test_who_watches_a_long_run_keeps_few_of_its_points_and_a_look_at_nothing_new_is_cheap(tmp_path):
    write_run(tmp_path, 200_000)
    look = Look(tmp_path)
    assert "train/loss 1" in " ".join(field.text for field in look()[1])
    assert max(map(len, look._points.values())) < 15_000
    steps = [point.step for point in look._points["train/loss"]]
    assert len(steps) > 1_000
    assert steps == sorted({*steps})
    assert {1, SPIKE, HOT, *range(199_500, 200_001)} <= {*steps}
    megabytes, seconds = measured(watch, tmp_path)
    assert megabytes < 150
    assert seconds < 0.02


def test_a_run_without_phases_is_watched(tmp_path):
    (tmp_path / "events.out.tfevents.1.host.1.0").write_bytes(Writer("speed/samples_per_s")(1, 5.0))
    (tmp_path / "life.jsonl").write_text('{"event": "start", "time": 1, "step": 0, "ranks": 1}\n')
    assert "5 samples/s" in [field.text for field in Look(tmp_path)()[1]]


@pytest.mark.slow
def test_the_page_of_a_long_run_takes_little_memory_and_time_and_has_what_matters(tmp_path):
    began = time.thread_time()
    write_run(tmp_path, STEPS)
    written = time.thread_time() - began
    megabytes, seconds = measured(report, tmp_path)
    assert megabytes < 150
    assert seconds < 2 * written, "1.4 times as long as writing the events here: a machine's speed is in both"
    text = (tmp_path / "report.html").read_text()
    assert len(text) < 5_000_000
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["metrics"]["train/loss"] == pytest.approx(1 + 100 / STEPS)
    assert summary["samples_per_s"] == pytest.approx(1003, abs=1)
    shown = next(chart for chart in text.split("<figure")[1:] if "train/loss" in chart)
    assert "50.0" in shown
    assert "nan" in shown


def test_a_thinned_curve_is_what_is_left_of_the_whole(tmp_path):
    """Also where a run was started again, and its numbers leap."""
    chance = random.Random(0)
    writer, twice = Writer("train/loss", "epoch"), Writer("run/ranks")
    file = tmp_path / "events.out.tfevents.1.host.1.0"
    with file.open("wb") as opened:
        for step in [*range(1, 40_001), *range(70_000, 80_001)]:
            opened.write(writer(step, chance.choice([chance.random(), math.inf, -1e9]), 1) + twice(step, 2))
    with file.open("ab") as opened:
        event = Event(wall_time=1.7e9 + 90_000, step=79_500)
        event.session_log.status = 1
        opened.write(framed(event.SerializeToString()))
        for step in range(79_500, 90_001):
            opened.write(writer(step, 7.0, 2))
    whole, thin = Curves(tmp_path), Curves(tmp_path, 500)
    curves, thinned = whole.read(), thin.read()
    assert curves.keys() == thinned.keys() == {"train/loss", "epoch", "run/ranks"}
    assert len(curves["train/loss"]) == 40_000 + 9_500 + 10_500 + 1
    for tag, points in thinned.items():
        assert {*points} <= {*curves[tag]}
        assert points == sorted(points, key=lambda point: point.step)
        assert points[0] == curves[tag][0]
        assert points[-400:] == curves[tag][-400:]
        assert len(points) < 5_000
    assert whole.starts == thin.starts == [(1.7e9 + 80_000, 80_000)]
    assert whole.read() == curves


def test_what_a_lost_host_had_done_after_its_checkpoint_is_repeated(tmp_path):
    """100 steps of a second, and no stop line: resumed at step 50, ten seconds after the last sign of it."""
    resumed = Event(wall_time=1.7e9 + 110, step=51)
    resumed.session_log.status = 1
    writer, again = Writer("train/loss"), Writer("train/loss", origin=1.7e9 + 60)
    records = [writer(step, 1.0) for step in range(1, 101)]
    records += [framed(resumed.SerializeToString()), *(again(step, 1.0) for step in range(51, 101))]
    (tmp_path / "events.out.tfevents.1.host.1.0").write_bytes(b"".join(records))
    lives = [
        {"event": "start", "time": 1.7e9, "began": 1.7e9 - 5, "step": 0, "ranks": 1},
        {"event": "start", "time": 1.7e9 + 110, "began": 1.7e9 + 110, "step": 50, "ranks": 1},
        {"event": "stop", "time": 1.7e9 + 160, "step": 100, "state": "finished", "why": None},
    ]
    (tmp_path / "life.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lives))
    result = goodput(read_history(tmp_path, "it").lives)
    assert str(result) == "60.6% training (3.0% starting, 30.3% repeated, 6.1% not running)"
