"""What the verb `ray` understands and decides without Ray: its words, and what follows a start that ended."""

import subprocess
import sys

import pytest

from project.engines.ray.fit import _waits, passed_on
from project.engines.ray.ledger import MOST, Ledger
from project.engines.ray.verb import main, read
from tests.conftest import ROOT, environment

DDP = ("fit", "--config", "configs/ddp.yaml")


def test_words_of_ray_and_words_of_the_training(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    asked = read([*DDP, "--workers", "3", "--min-workers=2", "--trainer.max_epochs", "4"])
    assert (asked.workers, asked.least, asked.address) == (3, 2, None)
    assert asked.run.startswith("ddp-")
    assert asked.words == [*DDP, "--trainer.max_epochs", "4", "--run", asked.run]
    asked = read([*DDP, "--run=it", "--trainer.default_root_dir=elsewhere", "--address=h1:6379"])
    assert asked.words == [*DDP, "--run=it", "--trainer.default_root_dir=elsewhere"]
    assert asked.checkpoints == tmp_path / "elsewhere/lightning_logs/it/checkpoints"
    assert asked.address == "h1:6379"


def test_a_trial_of_a_sweep_is_watched_under_the_name_that_it_has(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = read([*DDP, f"--sweep={ROOT}/configs/sweeps/lr.yaml", "--trial=2", "--run=it"])
    assert asked.run == "it-2"
    assert asked.checkpoints == tmp_path / "lightning_logs/it-2/checkpoints"
    assert asked.words[3:5] == ["--run", "it-2"]
    assert "--data.global_batch_size=128" in asked.words
    assert not [word for word in asked.words if word.startswith(("--sweep", "--trial"))]


def test_where_the_driver_is_does_not_go_to_the_workers(monkeypatch, tmp_path):
    """They may be on other nodes, in other images."""
    monkeypatch.chdir(tmp_path)
    for name in ("PROJECT_NODE", "PROJECT_IMAGE", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "said")
    passed = passed_on(read([*DDP]))
    assert passed["NCCL_DEBUG"] == "said"
    assert not {"PROJECT_NODE", "PROJECT_IMAGE"} & passed.keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers=0"], "--workers is a number from 1 on"),
        (["--workers=2", "--min-workers=3"], "--min-workers 3 is more than --workers 2"),
        (["--tune=sweep.yaml", "--workers=2", "--min-workers=1"], "--min-workers is not for --tune"),
        (["--tune=sweep.yaml", "--sweep=sweep.yaml"], "give one of them"),
        (["--gpus=-1"], "--gpus is a number from 0 on"),
        (["--max-failures=-2"], "--max-failures is a number from 0 on"),
    ],
)
def test_words_that_make_no_sense_are_refused(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        read([*DDP, *words])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_driver_loads_neither_torch_nor_lightning():
    code = (
        "import sys; from project.engines.ray.verb import read; read(['fit', '--config', 'configs/ddp.yaml']);"
        "import project.engines.ray.ledger, project.engines.ray.fit, project.engines.ray.search;"
        "print(sorted({'torch', 'lightning', 'ray'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_without_ray_it_says_what_to_install(tmp_path):
    """A `ray` that can't be imported stands in its way."""
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\")\n")
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    words = [sys.executable, "-m", "project", "ray", *DDP]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "ERROR   Ray can't be loaded: No module named 'ray'. HINT: pip install \"project[ray]\" (which is ray[train]>=2.60)."
    ]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:9", "There is no connection with the Ray cluster at 127.0.0.1:9: "),
        ("ray://h1", "that is no address of a Ray"),
    ],
)
def test_a_cluster_that_is_not_there_is_said_at_once(address, said):
    words = [sys.executable, "-m", "project", "ray", *DDP, f"--address={address}"]  # a program: it takes all signals
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_search_needs_to_know_what_decides(tmp_path, capsys):
    (tmp_path / "sweep.yaml").write_text("keys: {model.optimizer.init_args.lr: [0.1, 0.2]}")
    assert main([*DDP, f"--tune={tmp_path}/sweep.yaml"]) == 2
    assert "does not say what the trials are compared by" in capsys.readouterr().err


# What follows a start ------------------------------------------------------------------------------------------------


def started(failures: int = 3, ranks: int = 2) -> Ledger:
    ledger = Ledger(failures)
    assert ledger.begins("first", [f"h{rank + 1}" for rank in range(ranks)], "none")
    return ledger


def ends(ledger: Ledger, *codes: int) -> bool:
    for rank, code in enumerate(codes):
        ledger.ends(rank, code)
    assert ledger.decides
    return ledger.decide()


@pytest.mark.parametrize(
    ("codes", "again", "code"),
    [
        ((0, 0, 0), False, 0),
        ((143, 143, 143), False, 143),  # somebody told it to stop
        ((130, 130, 75), True, None),
        ((2, 2, 2), False, 2),  # a wrong key is as wrong the next time
        ((75, 75, -9), True, None),
        ((1, 75, 75), True, None),
    ],
)
def test_what_is_no_failure_is_not_tried_again(codes, again, code):
    ledger = started(ranks=3)
    assert ends(ledger, *codes) is again
    assert ledger.code == code


def test_after_so_many_failures_the_exit_code_is_the_ranks_own():
    ledger = started(failures=1)
    assert ends(ledger, 75, -9) is True
    assert "failure 1 of 1): rank 1 on h2: SIGKILL" in ledger.said[-1][1]
    assert ledger.begins("second", ["h1", "h2"], "step-000000003.ckpt")
    assert ends(ledger, 75, -9) is False
    assert ledger.code == 75


def test_a_host_that_is_taken_away_is_no_failure():
    ledger = started(failures=0)
    assert ledger.start is not None
    ledger.start.preempted = "h2"
    assert ends(ledger, 143, 143) is True
    assert ledger.failures == 0


def test_the_user_wants_an_end():
    ledger = started()
    ledger.asked = 15
    assert ends(ledger, 143, 143) is False
    assert ledger.code == 143
    assert not ledger.begins("second", ["h1"], "none")


@pytest.mark.parametrize(("codes", "code"), [({}, 75), ({0: 0}, 75), ({0: 143}, 143), ({0: 75}, 75)])
def test_a_rank_that_says_nothing_has_not_ended_well(codes, code, monkeypatch):
    """Its host was lost, and Ray has ended the others."""
    monkeypatch.setattr("project.engines.ray.ledger.LAST_WORDS", 0.0)
    ledger = started(failures=0)
    assert ledger.start is not None
    for rank, one in codes.items():
        ledger.ends(rank, one)
    ledger.start.gone, ledger.start.failed_at = True, 1.0
    assert ledger.decides
    assert ledger.decide() is False
    assert ledger.code == code


def test_who_is_lost_is_named_with_what_ray_says_of_it():
    """And not those that Ray has ended for it."""
    ledger = started()
    assert ledger.start is not None
    ledger.start.gone, ledger.start.failed_at, ledger.start.lost = True, -1e9, {1: "its node has died"}
    assert ledger.decides
    assert ledger.decide() is True
    told = f"(failure 1 of 3): rank 1 on {ledger.start.hosts[1]} is lost: its node has died."
    assert ledger.said[-1] == ("WARNING", f"Ray starts the workers again {told}")


@pytest.mark.parametrize(
    ("free", "told"),
    [
        ({"CPU": 2.0, "memory": 1e9}, "Ray has no place for 2 to 3 workers with 2 CPU each; free are: 2 CPU."),
        ({"memory": 1e9}, "Ray has no place for 2 to 3 workers with 2 CPU each; free are: none."),
        ({"CPU": 4.0}, "Ray has not started 2 to 3 workers with 2 CPU each yet, though 4 CPU are free: "),
    ],
)
def test_why_no_worker_has_been_started(free, told):
    asked = read([*DDP, "--workers=3", "--min-workers=2"])
    assert _waits(asked, {"CPU": 2.0}, free).startswith(told)


def test_workers_that_vanished_are_a_failure():
    ledger = started(failures=0)
    ledger.ends(0, 75)
    assert not ledger.begins("second", ["h1"], "none")
    assert ledger.code == 75
    assert "the worker on h2 vanished" in ledger.said[-1][1]


def test_starts_that_come_to_no_new_checkpoint_come_to_an_end():
    ledger = started(failures=100)
    for number in range(1, MOST):
        assert ends(ledger, 75, -9) is True
        assert ledger.begins(f"start {number}", ["h1", "h2"], "none")
    assert ends(ledger, 75, -9) is True
    assert not ledger.begins("one more", ["h1", "h2"], "none")
    assert ledger.code == 75
    assert f"started {MOST} times and came to no new checkpoint" in ledger.said[-1][1]
