"""Lost ranks are replaced by their supervisor, and the run is that of nobody's death: `recover.restarts`."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from math import inf
from pathlib import Path

import pytest
import torch
from jsonargparse import Namespace

from project.checkpoints.in_memory import CopyInterval
from project.cli.config import touches_nothing
from project.cluster.place import MEMORY
from project.cluster.processes import children
from project.launch.children import Children
from project.launch.losses import Losses
from project.launch.memory_folder import make_folder_in_memory
from project.launch.peers import Peers
from project.launch.supervisor import SUPERVISED, Supervisor
from tests.cluster.machine import wait_until
from tests.conftest import ROOT, TINY, environment, forked, program
from tests.own import write_texts
from tests.survive.test_resume import curves, same

SHARDED = '--trainer.strategy={"class_path": "project.Sharded", "init_args": {"shard": "full"}}'
OFTEN = ("--run=it", "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1")
RECOVER = ("--recover.restarts=9", "--recover.every_n_steps=2")
RUNS = {
    "minires": (
        *(
            "fit",
            "--config=configs/ddp.yaml",
            *TINY,
            *OFTEN,
            "--data.source.init_args.train_size=250",
            "--trainer.max_epochs=2",
        ),
        *("--data.batch_size=4", "--data.global_batch_size=24", "--trainer.val_check_interval=5"),
    ),
    # A user's own, with metrics, randomness in collate_fn and noise in the step
    "own": (
        *("fit", "--data=tests.own.PointsData", "--model=tests.own.Regression", "--trainer.max_epochs=8", *OFTEN),
        "--trainer.global_batch_size=24",
    ),
    "sharded": (
        *("fit", "--config=configs/gpt.yaml", *OFTEN, "--trainer.precision=32-true", "--trainer.global_batch_size=12"),
        *("--trainer.max_steps=14", "--trainer.val_check_interval=4", "--data.init_args.text=../texts", SHARDED),
        *("--data.init_args.held_out=0.2", "--data.init_args.context=32", "--data.init_args.batch_size=2"),
        *("--model.init_args.context=32", "--model.init_args.layers=2", "--model.init_args.heads=2"),
        *("--model.init_args.width=32", "--model.init_args.dropout=0.2", "--model.init_args.warmup_steps=3"),
    ),
}


def faults(*strikes: dict[str, object]) -> str:
    return "--trainer.callbacks=" + json.dumps(
        [{"class_path": "tests.probes.Fault", "init_args": strike} for strike in strikes]
    )


def memory_folders(output: str) -> set[Path]:
    """Returns the folders in memory from which a run has resumed."""
    return {Path(path) for path in re.findall(r"/dev/shm/samerun-state-\w+", output)}


def processes_of(folder: Path) -> list[int]:
    """Returns the processes of a supervised run in this folder that are alive."""
    alive = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            supervised = f"{SUPERVISED}=".encode() in (process / "environ").read_bytes()
            if (
                supervised
                and os.readlink(process / "cwd") == str(folder)
                and "State:\tZ" not in (process / "status").read_text()
            ):
                alive.append(int(process.name))
    return alive


def memory_of(process: int) -> Path:
    """Returns the folder in memory that a process has been given."""
    environ = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next(Path(entry.decode().partition("=")[2]) for entry in environ if entry.startswith(f"{MEMORY}=".encode()))


def final(folder: Path) -> dict[str, object]:
    """Returns the last checkpoint's content but for what names the settings of recovery."""
    newest = max((folder / "lightning_logs/it/checkpoints").glob("*.ckpt"))
    files = sorted(newest.glob("*.pt")) if newest.is_dir() else [newest]
    content = {file.name: torch.load(file, weights_only=True) for file in files}
    for part in content.values():
        part.pop("name", None)
        (part.get("checkpoint") or part).pop("configuration", None)
    return content


@pytest.mark.parametrize(
    ("run", "launcher", "ranks", "strikes"),
    [
        pytest.param(
            "minires, copied by cost",
            "python",
            3,
            [{"rank": 1, "step": 7}, {"rank": 0, "step": 11, "where": "accumulation"}],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "own",
            "torchrun",
            2,
            [{"rank": 1, "step": 4, "where": "validation"}, {"rank": 0, "step": 8}],
            marks=pytest.mark.faults,  # as "own" below and "sharded" with torchrun
        ),
        pytest.param(
            "sharded",
            "torchrun",
            3,
            [{"rank": 0, "step": 0}, {"rank": 2, "step": 5}, {"rank": 1, "step": 9}, {"rank": 2, "step": 9}],
            marks=pytest.mark.slow,
        ),
        ("own", "python", 1, [{"rank": 0, "step": 1}, {"rank": 0, "step": 6}]),
    ],
)
def test_a_run_whose_ranks_are_killed_is_the_run_of_ranks_that_are_not(tmp_path, run, launcher, ranks, strikes):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    write_texts(tmp_path / "texts")
    by = {"torchrun": ranks} if launcher == "torchrun" else {}
    words = () if by else (f"--trainer.devices={ranks}",)
    run, by_cost, _ = run.partition(", copied by cost")
    slowly = json.dumps({"class_path": "tests.probes.Ledger", "init_args": {"pause": 0.3}})
    # In 7 steps there is the time for a copy, and none is on the disk.
    late = ("--trainer.val_check_interval=10",) if by_cost else ()
    slow = ("--recover.every_n_steps=auto", f"--trainer.callbacks+={slowly}") if by_cost else ()
    done = program(killed, *RUNS[run], *RECOVER, *words, faults(*strikes), *late, *slow, **by)
    assert memory_folders(done.output) or not by_cost
    assert done.code == 0, done.output
    assert len(list(killed.glob("struck-*"))) == len(strikes)
    restarts = done.output.count("All ranks resume")
    assert restarts == done.output.count("was killed by signal 9")
    assert 1 <= restarts <= len(strikes)
    assert done.output.count("Each rank will hold at most") == (run == "sharded")  # not again with each start
    undisturbed = forked(whole, *RUNS[run], faults(), *late, ranks=ranks)
    assert undisturbed.code == 0, undisturbed.output
    assert same(final(killed), final(whole))
    assert curves(killed) == curves(whole)
    assert not [folder for folder in memory_folders(done.output) if folder.exists()]
    assert processes_of(killed) == []


@pytest.mark.slow
def test_a_users_class_is_made_when_it_is_needed_with_what_the_seed_gives(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    words = (*RUNS["own"], "--model=tests.survive.broken.Noted")
    words += ('--trainer.callbacks=[{"class_path": "tests.survive.broken.KilledWithSpares"}]',)
    done = program(killed, *words, *RECOVER, "--trainer.devices=3")
    assert done.code == 0, done.output
    assert (killed / "struck").read_text() == "3"  # spares were there, and had made none
    (whole / "struck").touch()
    undisturbed = forked(whole, *words, ranks=3)
    assert undisturbed.code == 0, undisturbed.output
    drawn, expected = (re.findall(r"a network is made: (\S+)", text) for text in (done.output, undisturbed.output))
    assert (len(drawn), {*drawn}) == (6, {*expected}), (drawn, expected)
    assert same(final(killed), final(whole))
    assert curves(killed) == curves(whole)


@pytest.mark.parametrize(
    ("class_path", "known"),
    [
        ("project.model.MiniResNet", True),
        ("torch.optim.SGD", True),
        ("mine.Net", False),
        ("torchvision.datasets.CIFAR10", False),
    ],
)
def test_only_classes_that_are_known_to_touch_nothing_are_made_early(class_path, known):
    inner = Namespace(class_path=class_path, init_args=Namespace())
    block = Namespace(class_path="torch.nn.Sequential", init_args=Namespace(parts={"first": inner}))
    for config in (Namespace(model=inner), Namespace(trainer=Namespace(callbacks=[inner])), Namespace(a=Namespace(b=block))):
        assert touches_nothing(config) is known


@pytest.mark.faults
def test_sixteen_ranks_of_which_one_is_killed_give_the_bits_of_one_process(tmp_path):
    killed, alone = tmp_path / "killed", tmp_path / "alone"
    killed.mkdir()
    alone.mkdir()
    words = (*RUNS["minires"], "--data.batch_size=8", "--data.global_batch_size=128")
    words += ("--trainer.val_check_interval=2", "--trainer.max_epochs=3", "--trainer.exact=true", "--trainer.threads=1")
    done = program(killed, *words, *RECOVER, "--trainer.devices=16", faults({"rank": 11, "step": 3}))
    assert done.code == 0, done.output
    assert done.output.count("All ranks resume") == 1
    assert forked(alone, *words, faults()).code == 0
    assert same(final(killed), final(alone))
    assert curves(killed) == curves(alone)


def test_a_supervisor_knows_the_step_of_its_ranks_when_one_is_lost():
    supervisor, (here, rank) = object.__new__(Supervisor), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor._facts, supervisor._attempt, supervisor._children = here, 1, Children()
    supervisor._step = supervisor._requested = supervisor._life = None
    supervisor._spares_at, supervisor._reason, supervisor._has_failed, supervisor._small_builds = inf, "", False, set()
    with here, rank:
        for attempt, step in ((0, 99), (1, 56), (1, 57)):
            rank.send(json.dumps({"attempt": attempt, "step": step}).encode())
        supervisor._read_facts()
    assert (supervisor._step, supervisor._spares_at) == (57, inf)


def test_a_supervisor_hears_from_more_others_than_select_can():
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._wake, supervisor._peers = os.pipe()[0], Peers(listens=True, several_hosts=False)
    receiver, sender = socket.socketpair()
    supervisor._facts = socket.socket(fileno=fcntl.fcntl(receiver, fcntl.F_DUPFD, 1500))
    assert supervisor._select(0.0) == []
    sender.send(b"lost")
    assert supervisor._select(60.0) == [supervisor._facts]


def start(folder: Path, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "project", *RUNS["own"], *RECOVER, "--trainer.max_epochs=100000", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment(**variables), stdout=(folder / "output.txt").open("w"), stderr=subprocess.STDOUT
    )


def has_trained(folder: Path) -> bool:
    return (folder / "lightning_logs/it/life.jsonl").is_file()


def test_supervisors_that_start_at_once_leave_each_other_their_memory(monkeypatch):
    """One that starts removes what killed ones have left; another one may just have made its folder, and not yet locked it."""
    make = tempfile.mkdtemp
    folders = []

    def make_while_another_starts(**where):
        made = make(**where)
        monkeypatch.setattr(tempfile, "mkdtemp", make)
        folders.append(make_folder_in_memory())
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", make_while_another_starts)
    folder = make_folder_in_memory()
    try:
        assert folder is not None
        assert {*folders, folder} <= {*Path("/dev/shm").glob("samerun-state-*")}
    finally:
        for made in filter(None, [*folders, folder]):
            made.rmdir()


def test_a_supervisor_that_is_killed_leaves_nothing_behind(tmp_path):
    supervisor = start(tmp_path, "--trainer.devices=2")
    wait_until(lambda: has_trained(tmp_path), 120, lambda: (tmp_path / "output.txt").read_text())
    (folder,) = {memory_of(process) for process in processes_of(tmp_path)}
    assert folder.is_dir()
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not processes_of(tmp_path), 30, lambda: str(processes_of(tmp_path)))
    wait_until(lambda: not folder.exists(), 30, str(folder))


def test_a_signal_stops_the_ranks_with_a_checkpoint_and_starts_none_again(tmp_path):
    supervisor = start(tmp_path, "--trainer.devices=2")
    wait_until(lambda: has_trained(tmp_path), 120, lambda: (tmp_path / "output.txt").read_text())
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(60) == 128 + signal.SIGTERM
    output = (tmp_path / "output.txt").read_text()
    assert "All ranks resume" not in output
    assert list((tmp_path / "lightning_logs/it/checkpoints").glob("*.ckpt")), output
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("to_supervisor", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_a_stop_is_not_forgotten_where_a_rank_is_lost_before_it(tmp_path, to_supervisor):
    stop = {"class_path": "tests.survive.broken.KilledAfterSignal", "init_args": {"to_supervisor": to_supervisor}}
    words = (*RUNS["own"], "--recover.restarts=9", "--recover.every_n_steps=1", "--trainer.devices=2")
    done = program(tmp_path, *words, f"--trainer.callbacks={json.dumps([stop])}")
    assert done.code == 75, done.output
    lost = r"Rank 1 on .* was killed by signal 9\. The run was to stop \(SIGTERM\): not restarted\. The same command "
    lost += r"resumes the run from step-000000004\.ckpt: the copies in memory, up to step-000000005, are lost\."
    for text in (done.output, (tmp_path / "lightning_logs/it/log.txt").read_text()):
        assert re.search(lost, text), done.output


def test_an_error_of_the_users_ends_the_run_at_once(tmp_path):
    done = program(tmp_path, *RUNS["own"], *RECOVER, "--trainer.devices=2", "--model=tests.survive.broken.Broken")
    assert (done.code, done.output.count("Traceback")) == (1, 1), done.output
    assert "RuntimeError: a bug of the user's" in done.output
    assert "All ranks resume" not in done.output


def test_a_wrong_setting_ends_the_run_before_a_rank_is_started(tmp_path):
    done = program(tmp_path, *RUNS["own"], *RECOVER, "--trainer.no_such_key=2")
    assert done.code == 2, done.output
    assert "no_such_key" in done.output


IMPORTED = """
import multiprocessing, os, threading, time
from pathlib import Path
import torch
from lightning.pytorch.utilities import rank_zero_only
from tests.own import Regression

RANK, FILE, STEPS = os.environ["LOCAL_RANK"], open("numbers", "rb", buffering=0), multiprocessing.Value("l", 0)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

class Imports(Regression):
    def __init__(self):
        super().__init__()
        rank_zero_only(print)("made by rank", RANK, flush=True)

    def on_train_start(self):
        self.first, STEPS.value = self.trainer.global_step, 0

    def training_step(self, batch, batch_idx):
        for at in range(200):
            FILE.seek(at)
            assert FILE.read(1)[0] == at
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        STEPS.value += 1

    def on_train_end(self):
        Path(f"rank-{self.trainer.global_rank}").write_text(f"{RANK} {STEPS.value - self.trainer.global_step + self.first}")
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_users_module_makes_when_it_is_imported_is_each_ranks_own(tmp_path, ranks):
    (tmp_path / "numbers").write_bytes(bytes(range(200)))
    (tmp_path / "imported.py").write_text(IMPORTED)
    words = (*RUNS["own"], *RECOVER, "--model=imported.Imports", f"--trainer.devices={ranks}", faults({"rank": 1, "step": 6}))
    done = program(tmp_path, *words, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.code == 0, done.output
    assert done.output.count("All ranks resume") == 1
    assert done.output.count("made by rank 0") == 2  # before and after the loss
    assert "made by rank 1" not in done.output
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(ranks)] == [f"{rank} 0" for rank in range(ranks)]


IMPORTED_SLOWLY = """
import os, time
from pathlib import Path
from tests.own import Regression

def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.02)

if Path("first").exists():  # this is a spare, which is needed while it still imports
    Path("second").touch()
    wait_for("go")
    assert not Path("broken").exists(), "a file that was edited meanwhile"
Path("first").touch()

class Slow(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 4 and not Path("struck").exists():
            wait_for("second")
            Path("struck").touch()
            os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_spare_that_is_needed_while_it_imports_reports_its_error_and_hears_a_signal(tmp_path, is_broken):
    (tmp_path / "slow.py").write_text(IMPORTED_SLOWLY)
    supervisor = start(tmp_path, "--model=slow.Slow", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    wait_until(lambda: "All ranks resume" in (tmp_path / "output.txt").read_text(), 120, "no rank was killed")
    if is_broken:
        (tmp_path / "broken").touch()
    else:
        supervisor.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    code = supervisor.wait(60)
    output = (tmp_path / "output.txt").read_text()
    assert code == (2 if is_broken else 128 + signal.SIGTERM), output
    assert output.count("AssertionError: a file that was edited meanwhile") == is_broken
    wait_until(lambda: not processes_of(tmp_path), 30, lambda: str(processes_of(tmp_path)))


def test_a_config_that_is_edited_while_the_run_trains_is_not_read_again(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {max_epochs: 3}\n")
    (tmp_path / "edits.py").write_text(
        "from pathlib import Path\nfrom tests.own import Regression\nclass Edits(Regression):\n"
        "    def on_train_start(self):\n        Path('mine.yaml').write_text('trainer: {max_epochs: 4, no_such_key: 1}')\n"
    )
    words = ("fit", "--config=mine.yaml", "--data=tests.own.PointsData", "--model=edits.Edits", *OFTEN, *RECOVER)
    words += ("--trainer.global_batch_size=24", faults({"rank": 0, "step": 4}))
    done = program(tmp_path, *words, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.code == 0, done.output
    assert done.output.count("All ranks resume") == 1
    (content,) = final(tmp_path).values()
    assert content["epoch"] == 3  # and not a fourth one


def test_ranks_compute_in_threads_after_a_users_module_has_when_it_was_imported(tmp_path):
    """OpenMP's threads are not forked, and a fork that has its notes of them waits for them without an end."""
    (tmp_path / "table.py").write_text(
        "import torch\nfrom tests.own import Regression\ntorch.ones(10_000_000).sum()\nclass Table(Regression):\n"
        "    def on_train_start(self):\n        torch.ones(10_000_000).sum()\n"
        "        print('threads:', torch.get_num_threads())\n"
    )
    words = (*RUNS["own"], *RECOVER, "--model=table.Table", "--trainer.max_epochs=1", "--trainer.threads=2")
    done = program(tmp_path, *words, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.code == 0, done.output
    assert "threads: 2" in done.output


@pytest.mark.slow
def test_ranks_that_are_lost_again_and_again_are_given_up(tmp_path):
    always = "--trainer.callbacks=" + json.dumps([{"class_path": "tests.survive.broken.AlwaysKilled"}])
    done = program(tmp_path, *RUNS["own"], *RECOVER, "--trainer.devices=2", always)
    assert done.code == 75, done.output
    assert done.output.count("All ranks resume") == 2
    assert "Ranks were lost 3 times within the same steps: not restarted. The same command resumes the run." in done.output
    assert "has lost ranks" not in done.output  # it is the code that fails at that step, on any host
    folder = tmp_path / "lightning_logs/it"
    assert (folder / "log.txt").read_text().count("WARNING Rank ") == 3
    wait_until((folder / "report.html").is_file, 60, "no rank is left that writes the report")


def test_a_hang_is_the_reason_of_the_restart_that_follows(tmp_path):
    """One rank has no other that it could have lost."""
    stuck = "--trainer.callbacks=" + json.dumps([{"class_path": "tests.probes.Stuck", "init_args": {"rank": 0}}])
    words = ("--recover.restarts=1", "--watchdog.at_least=1", "--watchdog.factor=2", stuck)
    done = program(tmp_path, *RUNS["own"], *words)
    assert done.code == 75, done.output
    assert re.search("WARNING Rank 0 on .* has made no progress since .* All ranks resume \\(restart 1 of 1\\)", done.output)
    stops = [json.loads(line) for line in (tmp_path / "lightning_logs/it/life.jsonl").read_text().splitlines()][1::2]
    assert all("has made no progress" in stop["why"] for stop in stops), stops


def test_without_the_process_that_forks_ranks_none_is_promised(tmp_path):
    supervisor = start(tmp_path, "--trainer.devices=2")
    wait_until(lambda: has_trained(tmp_path), 120, lambda: (tmp_path / "output.txt").read_text())
    server, *ranks = children(supervisor.pid)
    os.kill(server, signal.SIGKILL)
    os.kill(ranks[0], signal.SIGKILL)
    assert supervisor.wait(60) == 75
    output = (tmp_path / "output.txt").read_text()
    assert "The process from which ranks are forked has ended: not restarted. The same command " in output
    assert "All ranks resume" not in output
    wait_until(lambda: not processes_of(tmp_path), 30, lambda: str(processes_of(tmp_path)))


def test_losses_are_counted_by_the_progress_in_between():
    losses = Losses(4)
    killed, memory = "rank 0 was killed by signal 9.", "rank 0 was killed by signal 9, and its cgroup reports an OOM kill."
    assert losses.add(killed, "step-2") == losses.add(killed, "step-2") == losses.add(memory, "step-4") == ""
    assert losses.add(memory, "step-4") == "Memory ran out 2 times within the same steps"
    assert losses.add(killed, "step-6") == "It was restarted 4 times (recover.restarts)"


def test_a_copy_in_memory_is_due_when_the_last_one_has_cost_a_hundredth_of_the_time(monkeypatch):
    clocks = {"monotonic": 0.0, "thread_time": 0.0}
    for clock in clocks:
        monkeypatch.setattr(time, clock, lambda clock=clock: clocks[clock])
    interval, given = CopyInterval(None), CopyInterval(4)
    assert not interval.is_due(ahead=1.0, begins=False)  # what the ranks have begun with is there
    clocks["monotonic"] += 3.0
    assert interval.is_due(ahead=0.0, begins=False)
    with interval.measured(torch.device("cpu")):
        clocks["monotonic"] += 5.0  # of which others made it wait for most
        clocks["thread_time"] += 0.02
    assert not interval.is_due(ahead=1.0, begins=False)
    assert interval.is_due(ahead=2.5, begins=False)
    clocks["monotonic"] += 1.5
    assert interval.is_due(ahead=1.0, begins=False)
    assert not interval.is_due(ahead=1.0, begins=True)
    assert not given.is_due(ahead=1000.0, begins=False)


def test_the_newest_state_in_memory_is_resumed_from_and_steps_are_few(tmp_path):
    """In a pod, where it is said how to keep others from a bad node."""
    words = (*RUNS["own"], *RECOVER, "--recover.strikes=1", "--trainer.devices=2", "--doctor=true")
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PROJECT_NODE": "node-7"}
    done = program(tmp_path, *words, faults({"rank": 1, "step": 8}), **pod)
    assert done.code == 0, done.output
    hint = "All ranks resume (restart 1 of 9). HINT: kubectl cordon node-7 keeps new pods from there"
    assert f"(on node-7) has lost ranks 1 times within an hour. {hint}" in done.output
    assert done.output.count("The doctor's findings") == 1
    assert "step-000000008.ckpt" in done.output or "step-000000006.ckpt" in done.output, done.output
    lines = [json.loads(line) for line in (tmp_path / "lightning_logs/it/life.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "stop", "start", "stop"]
    assert (lines[1]["state"], lines[3]["state"]) == ("killed", "finished")
    assert "rank 1" in lines[1]["why"]
    assert 6 <= lines[2]["step"] <= 8
