"""Checkpoints that can be trusted: damaged ones are set aside, nothing is deleted early, a full disk stops nothing."""

import errno
import functools
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from project import Trainer
from project.checkpoints import in_memory, reading
from project.checkpoints.callback import Checkpoints, checkpoints_of
from project.checkpoints.in_memory import CopyInterval, MemoryWriter
from project.checkpoints.reading import (
    SafeCheckpointIO,
    Verification,
    checkpoints_in,
    manifest_of,
    newest_good,
    newest_in_memory,
    read_manifest,
    step_of,
)
from project.checkpoints.writing import clean_up, write
from project.cluster.place import MEMORY
from project.errors import FaultError
from project.plain_values import load
from project.runs import weights
from project.sharded.shards import Split
from tests.conftest import environment
from tests.survive.test_resume import FIT, assert_same_run, faults, same, uninterrupted  # noqa: F401

STATE = {"weights": torch.arange(1000.0), "step": 3}


def make(folder: Path, *steps: int) -> None:
    for step in steps:
        write(folder / f"step-{step:09d}.ckpt", {**STATE, "step": step}, {"step": step})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def manifest(path: Path) -> Path:
    return path.with_suffix(".json")


DAMAGES = {
    "cut short": cut,
    "empty": lambda path: path.write_bytes(b""),
    "one bit flipped": flip_a_bit,
    "another file": lambda path: path.write_bytes(b"x" * path.stat().st_size),
    "manifest gone": lambda path: manifest(path).unlink(),
    "manifest torn": lambda path: manifest(path).write_text(manifest(path).read_text()[:40]),
    "a folder in its place": lambda path: (path.unlink(), path.mkdir()),
    "a link to nowhere": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_set_aside_and_the_next_newest_taken(tmp_path, caplog, damage):
    make(tmp_path, 1, 2, 3)
    newest = tmp_path / "step-000000003.ckpt"
    DAMAGES[damage](newest)
    path, content = newest_good(tmp_path)
    assert path.name == "step-000000002.ckpt"
    assert content["step"] == 2
    assert "step-000000003.ckpt is not used" in caplog.text
    assert {record.levelname for record in caplog.records} == {"WARNING"}  # the run does not end
    assert not os.path.lexists(newest)
    assert os.path.lexists(tmp_path / "step-000000003.ckpt.bad")


def test_a_manifest_that_can_not_be_opened_now_sets_nothing_aside(tmp_path):
    make(tmp_path, 1, 2)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(FaultError, match=r"step-000000002\.ckpt can't be read: .*Too many open files.*It stays") as caught:
            read_manifest(tmp_path / "step-000000002.ckpt", content=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert caught.value.exit_code == 1
    assert len(checkpoints_in(tmp_path)) == 2


@pytest.mark.parametrize("parts", [False, True])
def test_a_content_that_can_not_be_read_now_sets_nothing_aside(tmp_path, monkeypatch, parts):
    make(tmp_path, 1, 2)
    newest = tmp_path / "step-000000002.ckpt"
    if parts:
        content = json.loads(manifest(newest).read_text())
        entry = {"bytes": content.pop("bytes"), "sha256": content.pop("sha256"), "rank": 0, "host": "h1"}
        manifest(newest).write_text(json.dumps({**content, "parts": {"whole.pt": entry}}))
        newest.rename(tmp_path / "whole.pt")
        newest.mkdir()
        (tmp_path / "whole.pt").rename(newest / "whole.pt")
    assert newest_good(tmp_path)[0] == newest
    folder = tmp_path / "run"
    (tmp_path / "run").mkdir()
    (folder / "checkpoints").symlink_to(tmp_path)

    def stale(path, follow=True):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(reading, "open_to_read", stale)
    with pytest.raises(FaultError, match=r"step-000000002\.ckpt.* can't be read: .*Stale file handle"):
        newest_good(tmp_path)
    with pytest.raises(FaultError, match="Stale file handle"):
        weights(folder, None, None, "min")  # no other weights in their place
    assert len(checkpoints_in(tmp_path)) == 2


def test_a_write_that_fails_leaves_nothing(tmp_path):
    class Unwritable:
        def __reduce__(self):
            raise OSError("disk full")

    make(tmp_path, 1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "step-000000002.ckpt", {"x": Unwritable()}, {})
    assert sorted(tmp_path.iterdir()) == before


MOVES = ((os, "fsync"), (os, "replace"), (os, "unlink"), (torch, "save"))


def killed(path: Path, move: int) -> bool:
    """Whether a process that writes a checkpoint is killed before its so-manieth move."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    moves = itertools.count()

    def counted(real, *args, **named):
        if next(moves) == move:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **named)

    for module, name in MOVES:
        setattr(module, name, functools.partial(counted, getattr(module, name)))
    write(path, {**STATE, "again": True}, {"finished": True})
    os._exit(0)


@pytest.mark.parametrize("step", [1, 2])
def test_a_write_that_is_killed_at_any_move_leaves_a_whole_checkpoint(tmp_path, step):
    """The file that was there, of the same name or another, or the new one."""
    for move in itertools.count():
        write(tmp_path / "step-000000001.ckpt", STATE, {"finished": False})
        if not killed(tmp_path / f"step-{step:09d}.ckpt", move):
            break
        clean_up(tmp_path)
        path, manifest = newest_good(tmp_path, set_aside=False)
        assert manifest["finished"] == ("again" in load(path))
        assert {file.suffix for file in tmp_path.iterdir()} == {".ckpt", ".json"}
        path.unlink()
    assert move > 6


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    callback = Checkpoints(keep_last=2)
    callback._folder = tmp_path
    for step, accuracy in enumerate([0.1, 0.9, 0.3, 0.2, 0.4], start=1):
        callback._write(tmp_path / f"step-{step:09d}.ckpt", Split(STATE, {}), {"metrics": {"val/acc": accuracy}})
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [f"step-{n:09d}.ckpt" for n in (2, 4, 5)]
    assert callback.best is not None
    assert callback.best[1].name == "step-000000002.ckpt"
    callback._write(
        tmp_path / "step-000000006.ckpt",
        Split(STATE, {}),
        {"metrics": {"val/acc": 0.9}, "position": {"global_step": 6}},
    )
    assert callback.best == (0.9, tmp_path / "step-000000002.ckpt"), "of equals, the first"
    folder = tmp_path.rename(tmp_path.with_name("checkpoints")).parent
    assert weights(folder, "best", "val/acc", "max").name == "step-000000002.ckpt"


def test_nothing_is_deleted_before_its_successor_is_verified(tmp_path, monkeypatch):
    callback = Checkpoints(keep_last=1, monitor=None)
    callback._folder = tmp_path
    callback._write(tmp_path / "step-000000001.ckpt", Split(STATE, {}), {})

    def broken(path):
        raise ValueError("its checksum is wrong")

    monkeypatch.setattr("project.checkpoints.writing.read_manifest", broken)
    callback._write(tmp_path / "step-000000002.ckpt", Split(STATE, {}), {})
    assert callback.failed is not None
    monkeypatch.undo()
    assert read_manifest(tmp_path / "step-000000001.ckpt")


def test_a_process_that_ends_does_not_wait_for_what_is_being_read(tmp_path, monkeypatch):
    reads, released = threading.Event(), threading.Event()
    monkeypatch.setattr("project.checkpoints.reading._problem", lambda *_: "" if reads.set() or released.wait() else "lost")
    part = {"rank": 0, "host": "h", "bytes": 1, "sha256": ""}
    manifest(path := tmp_path / "step-000000001.ckpt").write_text(json.dumps({"parts": {"whole.pt": part}}))
    threads_before = {*threading.enumerate()}
    verification = Verification(path)
    assert reads.wait(60)
    readers = {*threading.enumerate()} - threads_before
    # Python waits for those that are no daemons, and for an executor's.
    assert all(thread.daemon and "Executor" not in thread.name for thread in readers)
    released.set()
    verification.setup(None, None, "fit")  # type: ignore[arg-type]
    for thread in readers:
        thread.join(60)
    assert not any(thread.is_alive() for thread in readers)


# Real runs -----------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_the_one_before(uninterrupted, quick, tmp_path):  # noqa: F811
    stop = faults({"step": 14, "number": int(signal.SIGTERM)})
    assert quick(*FIT, stop).code == 143
    newest = max((tmp_path / "lightning_logs/it/checkpoints").glob("*.ckpt"))
    cut(newest)
    resumed = quick(*FIT, stop)
    assert resumed.code == 0, resumed.output
    assert f"{newest} is not used" in resumed.output
    assert_same_run(tmp_path, uninterrupted(1))


@pytest.fixture
def small_disk(tmp_path):
    """A file system that is full, but for a few hundred kB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_stops_nothing_and_breaks_nothing(quick, small_disk):
    words = (*FIT, f"--trainer.default_root_dir={small_disk}", "--trainer.callbacks=tests.probes.Filler")
    run = quick(*words, ranks=2, timeout=120)
    assert run.code == 1, run.output
    failed = re.findall(r"Checkpoint (\S+) could NOT be written", run.output)
    assert failed == sorted({*failed}) != [], "each is named once, also the last one, which is tried again"
    assert "No space left on device" in run.output
    assert re.search(r"epoch 3/\d+  step 21", run.output)  # training went on
    assert "Traceback" not in run.output
    (small_disk / "filler").unlink()
    checkpoints = small_disk / "lightning_logs/it/checkpoints"
    assert not list(checkpoints.glob(".step*"))
    assert [path.name for path in checkpoints.glob("*.ckpt")] == ["step-000000003.ckpt"]
    resumed = quick(*FIT, f"--trainer.default_root_dir={small_disk}")
    assert resumed.code == 0, resumed.output
    assert "Resumes from" in resumed.output


class StepsNowAndThen(LightningModule):
    """Steps with every third batch."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        if batch_idx % 3 == 2:
            self.manual_backward(self.layer(batch).sum())
            self.optimizers().step()


AT = {"epoch": 1, "step": 2, "global_step": 8, "logged_steps": 8}


def memory_writer(folder):
    return MemoryWriter(folder, SimpleNamespace(global_rank=0, local_rank=0, world_size=1, strategy=None))


def test_a_state_in_memory_leaves_room_for_loader_processes(small_disk, caplog):
    large, small = (Split({"weights": torch.zeros(count)}, {}) for count in (150_000, 50_000))
    writer = memory_writer(small_disk)
    for step, own in enumerate((small, large, large, small), 1):
        writer.save(step, own, {"world_size": step}, resumed_at=0)
    assert [step_of(path) for path in checkpoints_in(small_disk)] == [1, 4]
    assert len(caplog.records) == 1, "one line for each cause"
    assert "The state of step 2 is not kept in memory: 2 states would take 1 MiB, more than half of /dev/shm" in caplog.text


def test_a_state_in_memory_is_what_was_saved(tmp_path, monkeypatch):
    """Also where the memory of an older state is used again, and the tensors have changed since."""
    monkeypatch.setenv(MEMORY, str(tmp_path))
    shared, drawn = torch.zeros(3), torch.Generator().manual_seed(1)
    tensors = {
        "weights": nn.Parameter(torch.randn(4, 3, 5, 5, generator=drawn).to(memory_format=torch.channels_last)),
        **{str(kind): torch.randn(7, generator=drawn).to(kind) for kind in (torch.bfloat16, torch.bool, torch.complex64)},
        **{"transposed": torch.randn(6, 4, generator=drawn).T, "repeated": torch.ones(1).expand(5)},
        **{
            "scalar": torch.tensor(2, dtype=torch.int64),
            "empty": torch.empty(0, 3),
            "conjugated": torch.ones(2).cfloat().conj(),
        },
    }
    state = {**tensors, "list": [shared, (shared, "text", 1.5)], "#0": "text", "other": torch.ones(2).to_sparse()}
    writer = memory_writer(tmp_path)
    for step in (2, 4, 6, 8):
        with torch.no_grad():
            tensors["weights"].mul_(step)
        expected = torch.save(state, tmp_path / "expected.pt") or load(tmp_path / "expected.pt", mmap=False)
        writer.save(step, Split(state, {}), {"position": AT, "finished": False}, resumed_at=0)
    with torch.no_grad():
        tensors["weights"].zero_()
    assert [step_of(path) for path in checkpoints_in(tmp_path)] == [6, 8]
    path, manifest = newest_in_memory(None)
    assert (step_of(path), manifest["position"]) == (8, AT)
    read = SafeCheckpointIO().load_checkpoint(path)
    assert same(read.pop("other").to_dense(), expected.pop("other").to_dense())
    assert same(read, expected)
    assert {name: read[name].stride() for name in tensors} == {
        name: torch.empty_like(tensors[name]).stride() for name in tensors
    }
    assert read["list"][0] is read["list"][1][0]
    assert newest_in_memory(path) is None


def test_a_state_in_memory_that_is_written_again_does_not_count_meanwhile(tmp_path, monkeypatch):
    """By another fit of the process, say. Killed then, half of it would be of before."""
    monkeypatch.setenv(MEMORY, str(tmp_path))
    manifest = {"position": AT, "finished": False}
    for kept in ((2, 4), (4,)):
        writer = memory_writer(tmp_path)
        for step in kept:
            if len(kept) == 1:
                monkeypatch.setattr(in_memory, "view_at", lambda *_: sys.exit("killed"))
            with suppress(SystemExit):
                writer.save(step, Split({"value": torch.full((9,), step)}, {}), manifest, resumed_at=2)
    assert step_of(newest_in_memory(None)[0]) == 2


def test_a_step_is_kept_in_memory_once_where_a_module_steps_by_itself(tmp_path):
    kept = []
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", max_epochs=1, enable_progress_bar=False)
    saves = SimpleNamespace(save=lambda step, *_: kept.append(step), close=lambda: None, is_busy=lambda: False)

    class KeptInMemory(Callback):
        def setup(self, trainer, pl_module, stage):
            checkpoints_of(trainer).keep_in_memory(saves, CopyInterval(2), replaces_ranks=False)

    trainer.callbacks.append(KeptInMemory())
    trainer.fit(StepsNowAndThen(), DataLoader(torch.randn(30, 3), batch_size=2))
    assert kept == [2, 4]


def test_a_state_in_memory_that_holds_a_class_is_passed_over(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(MEMORY, str(tmp_path))
    writer = memory_writer(tmp_path)
    for step, value in ((2, 1), (4, SimpleNamespace(of="the user"))):
        writer.save(step, Split({"value": value}, {}), {"position": AT, "finished": False}, resumed_at=0)
    assert step_of(newest_in_memory(None)[0]) == 2
    assert "The state of step 4 in memory is not used" in caplog.text
    manifest_of(checkpoints_in(tmp_path)[0]).unlink()
    assert newest_in_memory(None) is None, "its writer was killed"


def test_a_folder_that_disappears_is_made_again(quick, tmp_path):
    run = quick(*FIT, "--trainer.callbacks=tests.probes.Remover")
    assert run.code == 0, run.output
    assert newest_good(tmp_path / "lightning_logs/it/checkpoints") is not None


def test_a_read_only_place_is_one_line(quick, tmp_path):
    (tmp_path / "file").write_text("")
    run = quick(*FIT, f"--trainer.default_root_dir={tmp_path}/file")
    assert run.code == 2
    assert "Traceback" not in run.output
    assert "can't be made" in run.output


def test_a_link_as_the_runs_folder_and_tmpdir_elsewhere(uninterrupted, quick, tmp_path, monkeypatch):  # noqa: F811
    target = Path("/dev/shm") / f"run-{os.getpid()}"
    target.mkdir()
    try:
        (tmp_path / "lightning_logs").mkdir()
        (tmp_path / "lightning_logs/it").symlink_to(target)
        fault = faults({"where": "write", "step": 9})
        assert quick(*FIT, fault).code == -signal.SIGKILL
        assert quick(*FIT, fault).code == 0
        assert_same_run(tmp_path, uninterrupted(1))
    finally:
        subprocess.run(["rm", "-r", str(target)], check=True)


def test_two_runs_in_one_folder_are_refused(tmp_path, quick):
    words = [sys.executable, "-m", "project", *FIT, "--trainer.max_epochs=100000"]
    first = subprocess.Popen(words, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert first.stderr is not None
        for line in first.stderr:
            if "global batch" in line:
                break
        second = quick(*FIT)
        assert second.code == 1
        assert "is going on already" in second.output
        assert second.output.count("\n") == 1
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 143


def test_a_changed_configuration_is_named(quick, tmp_path):
    stop = faults({"step": 14, "number": int(signal.SIGTERM)})
    assert quick(*FIT, stop).code == 143
    refused = quick(*FIT, stop, "--seed_everything=5")
    assert refused.code == 2
    assert "seed_everything: 0 -> 5" in refused.output
    changed = quick(*FIT, stop, "--model.label_smoothing=0.1", "--change=model.label_smoothing", "--data.num_workers=1")
    assert changed.code == 0
    assert "The configuration of the run has changed: model.label_smoothing: 0.0 -> 0.1" in changed.output
    finished = quick(*FIT, stop, "--model.label_smoothing=0.1")
    assert finished.code == 0
    assert "The run is finished" in finished.output
    assert not re.search(r"epoch \d", finished.output), "nothing is trained"
    never = quick(*FIT, "--resume=never")
    assert never.code == 2
    assert "choose another --run" in never.output


def test_from_a_path_what_came_later_is_set_aside(uninterrupted, quick, tmp_path):  # noqa: F811
    assert quick(*FIT, faults(), "--checkpoints.keep_last=20").code == 0
    folder = tmp_path / "lightning_logs/it/checkpoints"
    resumed = quick(*FIT, faults(), "--checkpoints.keep_last=20", f"--resume={folder}/step-000000009.ckpt")
    assert resumed.code == 0, resumed.output
    assert_same_run(tmp_path, uninterrupted(1))
    assert json.loads((folder / "step-000000024.json").read_text())["finished"]


def test_a_state_is_copied_when_the_copy_before_it_is_on_the_disk(monkeypatch):
    checkpoints, written = Checkpoints(), threading.Event()
    checkpoints._pending = ThreadPoolExecutor(1).submit(written.wait)
    threading.Timer(0.2, written.set).start()
    monkeypatch.setattr(checkpoints, "_state", lambda trainer, finished: (written.is_set(), {}))
    monkeypatch.setattr("project.checkpoints.callback.copy_to_host", lambda own: own)
    assert checkpoints._copied_state(None, finished=False) == (True, {})
