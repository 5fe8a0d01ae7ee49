"""Ctrl-C, a terminal that is closed: all ranks stop at the same step, with a checkpoint, and the shell sees 130, 129."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from project import Trainer
from project.checkpoints.callback import Checkpoints
from project.survive import failure, preemption
from project.survive.preemption import StopTogether
from project.survive.signals import Signals
from tests.cluster.machine import wait_until
from tests.conftest import ROOT, TINY, environment
from tests.own import Points, PointsData

LONG = ("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_epochs=100000", "--data.num_workers=0")


@pytest.mark.parametrize(
    "who",
    [
        pytest.param("one process", marks=pytest.mark.faults),
        "the terminal's group",
        pytest.param("only rank 0 of two", marks=pytest.mark.faults),
    ],
)
def test_ctrl_c_stops_with_a_checkpoint(tmp_path, who):
    ranks = 1 if who == "one process" else 2
    run = subprocess.Popen(
        [sys.executable, "-m", "project", *LONG, f"--trainer.devices={ranks}", "--run=long"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines, sent = [], False
    assert run.stdout is not None
    for line in run.stdout:
        lines.append(line)
        if "epoch 1/" in line and not sent:  # the first validation is over
            sent = True
            (os.killpg if "group" in who else os.kill)(run.pid, signal.SIGINT)
    assert run.wait(30) == 130, lines
    text = "".join(lines)
    assert text.count("Stopped by SIGINT after step") == 1
    assert "Traceback" not in text
    step = int(text.partition("after step ")[2].partition(".")[0])
    newest = max((tmp_path / "lightning_logs/long/checkpoints").glob("*.ckpt"))
    checkpoint = torch.load(newest, weights_only=True)
    assert checkpoint["global_step"] == step


def test_ctrl_c_in_a_plain_script_tells_how_to_resume(tmp_path, monkeypatch, caplog):
    """Without logging.basicConfig Python prints warnings alone. A notebook may train again: that is no second Ctrl-C."""
    for place in (preemption, failure):
        monkeypatch.setattr(place, "BY_COMMAND", threading.Event())
    pressed = LambdaCallback(on_train_batch_end=lambda *_: signal.raise_signal(signal.SIGINT))
    settings = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0, "enable_progress_bar": False}
    for level in ("WARNING", "INFO"):
        caplog.set_level(level)
        caplog.clear()
        trainer = Trainer(default_root_dir=tmp_path / level, accelerator="cpu", callbacks=[pressed], **settings)
        with pytest.raises(SystemExit, match="130"):
            trainer.fit(BoringModel())
        (record,) = (record for record in caplog.records if record.msg.startswith("Stopped by SIGINT after step 1."))
        assert (record.levelname, "resumes" in record.msg) == (level, level == "WARNING")
        assert str(tmp_path / level / "checkpoints/step-000000001.ckpt") in record.msg


@pytest.mark.slow
def test_a_terminal_that_is_closed_stops_with_a_checkpoint(tmp_path):
    """As when the ssh session ends: SIGHUP to all ranks, and nobody can print any more."""
    words = [sys.executable, "-m", "project", *LONG, "--trainer.devices=3", "--data.batch_size=8", "--run=long"]
    words += ["--data.global_batch_size=24", "--data.num_workers=1"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        os.execvpe(words[0], words, environment(TERM="xterm"))
    seen = b""
    while b"epoch 1" not in seen:
        seen += os.read(terminal, 1024)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    log = (tmp_path / "lightning_logs/long/log.txt").read_text()
    assert log.count("Stopped by SIGHUP after step") == 1, log
    step = int(log.partition("after step ")[2].partition(".")[0])
    newest = max((tmp_path / "lightning_logs/long/checkpoints").glob("*.ckpt"))
    assert torch.load(newest, weights_only=True)["global_step"] == step


@pytest.mark.slow
def test_nohup_keeps_a_run_going_and_a_repeated_sigterm_ends_it_with_143(tmp_path):
    slow = json.dumps([{"class_path": "tests.probes.SlowDisk", "init_args": {"seconds": 600}}])
    hurry = tmp_path / "hurry"
    hurry.touch()
    run = subprocess.Popen(
        ["nohup", sys.executable, "-m", "project", *LONG, "--trainer.devices=2", f"--trainer.callbacks={slow}"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    for line in run.stdout:
        if "epoch 1" in line:
            os.killpg(run.pid, signal.SIGHUP)
            break
    for line in run.stdout:
        if "epoch 2" in line:  # it did not mind
            hurry.unlink()
            os.killpg(run.pid, signal.SIGTERM)
            break
    with pytest.raises(subprocess.TimeoutExpired):  # it writes its checkpoint
        run.wait(3)
    os.killpg(run.pid, signal.SIGTERM)
    assert run.wait(10) == 143


@pytest.mark.faults
def test_a_checkpoint_that_takes_longer_than_torchrun_waits_is_said_before_a_signal_comes(cli):
    slow = json.dumps([{"class_path": "tests.probes.SlowDisk", "init_args": {"seconds": 1.5}}])
    words = ("--trainer.max_epochs=1", f"--trainer.callbacks={slow}", "--checkpoints.every_n_steps=1", "--data.batch_size=8")
    run = cli(*LONG, *words, "--data.global_batch_size=64", torchrun=2, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    assert run.code == 0, run.output
    assert run.output.count("A checkpoint takes 2 s, and after a signal this job has 1 s: it would be cut short.") == 1
    assert "HINT: TORCH_ELASTIC_SHUTDOWN_TIMEOUT=60" in run.output


def test_ranks_whose_steps_are_short_stop_soon_at_the_same_one(quick):
    """They don't compare notes at every step."""
    fault = {"class_path": "tests.probes.Fault", "init_args": {"rank": 1, "step": 300, "number": int(signal.SIGTERM)}}
    run = quick(
        *(
            "fit",
            "--config=configs/ddp.yaml",
            *TINY,
            "--data.source.init_args.train_size=100000",
            "--trainer.limit_val_batches=0",
        ),
        *("--model.network=scripts.bench.worker.Trivial", f"--trainer.callbacks={json.dumps([fault])}", "--run=short"),
        *("--trainer.log_every_n_steps=100", "--data.batch_size=16", "--data.global_batch_size=32"),
        ranks=2,
    )
    assert run.code == 128 + signal.SIGTERM, run.output
    assert run.output.count("Stopped by SIGTERM after step") == 1
    step = int(run.output.partition("after step ")[2].partition(".")[0])
    assert 300 <= step <= 318  # twice eight steps, and two to send and to read


class Due(Checkpoints):
    """Says that it is time to save, until it has."""

    saves = 0

    @property
    def overdue(self):
        return not self.saves

    def save(self, trainer, finished=False):
        self.saves += 1


class Answer:
    def wait(self):
        pass


def test_when_the_time_has_come_all_save_once(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: Answer())
    due, stop = Due(), StopTogether(Signals())
    stop._group = lambda: "a group"
    trainer = SimpleNamespace(callbacks=[due], accumulate_grad_batches=1)
    for _ in range(30):
        stop.on_step_begins(trainer, None)
        stop._restart_interval(trainer, None)  # so that they compare notes at every step
    assert due.saves == 1


def test_steps_that_become_long_are_not_counted_as_short(monkeypatch):
    """A validation of quick batches, and slow training after it: a signal must not wait for many steps."""
    clock, started = [0.0], []

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: started.append(clock[0]) or Answer())
    monkeypatch.setattr(preemption, "_evaluation_batches", lambda trainer: [80.0, 80.0])
    stop, trainer = StopTogether(Signals()), SimpleNamespace(callbacks=[], accumulate_grad_batches=1)
    stop._group = lambda: "a group"

    def steps(seconds, count):
        before = len(started)
        for _ in range(count):
            clock[0] += seconds
            stop._compare(trainer, None)
        return len(started) - before

    stop.on_train_epoch_start(trainer, None)
    assert steps(5.0, 20) == 20
    stop.on_validation_start(trainer, None)
    assert steps(0.001, 80) < 20
    stop.on_validation_end(trainer, None)
    assert steps(5.0, 20) == 20


class ThreeLoaders(PointsData):
    def val_dataloader(self):
        return [DataLoader(Points(size), batch_size=1) for size in (3, 3, 10)]


def test_ranks_with_more_batches_of_some_loaders_meet_at_the_end_of_each(quick):
    """One of two ranks has a batch more of the first two loaders: it must not wait in the second for what the other sends in
    the third.
    """
    words = ("--model=tests.own.Regression", "--data=tests.survive.test_preemption.ThreeLoaders")
    settings = ("--trainer.exact=true", "--trainer.accelerator=cpu", "--trainer.max_epochs=2", "--trainer.global_batch_size=4")
    run = quick("fit", *words, *settings, "--trainer.limit_train_batches=2", ranks=2, timeout=30)
    assert run.code == 0, run.output


@pytest.mark.parametrize("loading", ["torch._C", "project.cli.main"])
def test_ctrl_c_before_training_is_quiet(tmp_path, loading):
    program = f"""
import signal, sys
import project.__main__

class Impatient:
    def find_spec(self, name, *_):
        if name == {loading!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Impatient())
sys.argv = ["project", "fit"]
project.__main__.main()
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def test_an_echo_of_a_signal_is_no_second_one():
    signals = Signals()
    signals.register_signal_handlers()
    try:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the launcher passes on what the terminal sent
        assert signals.noted == signal.SIGINT
    finally:
        signals.teardown()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_what_is_ignored_from_the_start_stays_so(ignored):
    """nohup's SIGHUP; the SIGINT of what a shell script starts in the background."""
    before, signals = signal.signal(ignored, signal.SIG_IGN), Signals()
    try:
        signals.register_signal_handlers()
        signal.raise_signal(ignored)
        assert signals.noted is None
    finally:
        signals.teardown()
        signal.signal(ignored, before)


COUNTS_DOWN = """
import hashlib, os, signal, threading
from project.survive.requeue import REQUEUE, listen_for_signals
def begin(number):
    print(number.name, flush=True)
    os._exit(0)
REQUEUE.begin_countdown = begin
listen_for_signals()
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
threading.Timer(5.0, os._exit, (1,)).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour, in which no Python code runs in this thread
"""


def test_the_time_that_slurm_leaves_is_counted_while_the_main_thread_is_in_c():
    run = subprocess.run([sys.executable, "-c", COUNTS_DOWN], cwd=ROOT, env=environment(), capture_output=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, b"SIGUSR1\n")


@pytest.mark.parametrize("where", [pytest.param("Python", marks=pytest.mark.faults), pytest.param("C", marks=pytest.mark.slow)])
def test_a_second_sigterm_ends_a_run_that_never_begins(tmp_path, where):
    """It is still reading what its config names."""
    words = ("--model.class_path=tests.endless.Model", "--trainer.max_steps=1")
    with (tmp_path / "output.txt").open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "project", "fit", *words],
            cwd=tmp_path, env=environment(WAITS_IN=where), stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            wait_until((tmp_path / "loading").exists, 60, (tmp_path / "output.txt").read_text)
            run.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):  # a launcher and a terminal may both pass on one
                run.wait(2.5)
            run.send_signal(signal.SIGTERM)
            assert run.wait(10) == 143
        finally:
            run.kill()
