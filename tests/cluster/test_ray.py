"""A real Ray on two hosts: whatever happens to workers, hosts and the driver, the run is the one that it would have been."""

import json
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cluster.machine import LONG, wait_until
from tests.cluster.ray_hosts import RayHosts
from tests.cluster.training import FIT, RECOVER, assert_same_curve, slowly, step
from tests.conftest import forked, took
from tests.survive.test_resume import faults, same

pytestmark = pytest.mark.slow

TWO = ("--workers=2", "--placement=SPREAD", "--run=it")


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    """h1 and h2 with two CPUs each."""
    began = time.monotonic()
    with RayHosts(2, tmp_path_factory.mktemp("ray")) as made:
        took("two hosts with Ray", time.monotonic() - began)
        yield made


@pytest.fixture
def cluster(two_hosts: RayHosts) -> Iterator[RayHosts]:
    """Both are there; hosts that a test has lost are back after it."""
    yield two_hosts
    two_hosts.restore()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """The curve and the weights of the same training on two ranks, that nothing happened to."""
    folder = tmp_path_factory.mktemp("two")
    run = forked(folder, *FIT, "--run=it", ranks=2)
    assert run.code == 0, run.output
    return run.curve("train/loss"), weights(folder)


def weights(folder: Path, run: str = "it") -> dict[str, torch.Tensor]:
    """Of the newest checkpoint of a run."""
    newest = max((folder / "lightning_logs" / run / "checkpoints").glob("step-*.ckpt"))
    state: dict[str, torch.Tensor] = torch.load(newest, weights_only=True)["state_dict"]
    return state


def assert_same(folder: Path, two_ranks: tuple[dict[int, float], dict[str, torch.Tensor]]) -> None:
    """One curve, and the same weights to the last bit."""
    curve, expected = two_ranks
    assert_same_curve(folder, curve)
    actual = weights(folder)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def comes_to(folder: Path, number: int, driver: object) -> None:
    wait_until(lambda: step(folder) >= number, LONG, lambda: f"step {step(folder)}: {driver.output()}")  # type: ignore[attr-defined]


@pytest.mark.faults
def test_three_workers_on_two_hosts_make_the_same_run_as_one_process(alone, cluster, tmp_path):
    driver = cluster.start(*FIT, "--workers=3", "--run=it", cwd=tmp_path)
    assert driver.code() == 0, driver.output()
    assert driver.output().count("Ray: 3 workers on ") == 1
    assert driver.output().count("INFO    Run: ") == 1
    assert "pid=" not in driver.output()
    assert_same_curve(tmp_path, alone)


def test_a_killed_rank_and_a_signal_to_the_driver(cluster, two_ranks, tmp_path):
    key = secrets.token_hex()
    words = (*FIT, slowly(0.05, crawl_from=25), *TWO)
    driver = cluster.start(*words, cwd=tmp_path, env={"WANDB_API_KEY": key})
    comes_to(tmp_path, 10, driver)
    began = time.monotonic()
    child = cluster.children(1)[0]
    assert f"WANDB_API_KEY={key}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    os.kill(child, signal.SIGKILL)
    driver.says("SIGKILL")
    took("a rank's SIGKILL: Ray starts all again after", time.monotonic() - began)
    driver.says("Resumes from")
    took("and they go on after", time.monotonic() - began)
    comes_to(tmp_path, 20, driver)
    os.kill(driver.pid, signal.SIGTERM)
    assert driver.code() == 143, driver.output()
    assert driver.output().count("Stopped by SIGTERM after step") == 1
    assert "failure 1 of 3" in driver.output()
    assert "failure 2" not in driver.output()
    without(key, cluster, tmp_path)
    (tmp_path / "hurry").touch()
    driver = cluster.start(*words, cwd=tmp_path)
    assert driver.code() == 0, driver.output()
    assert_same(tmp_path, two_ranks)


@pytest.mark.faults
def test_killed_ranks_are_replaced_and_ray_need_not_know(cluster, two_ranks, tmp_path):
    driver = cluster.start(*FIT, *RECOVER, *TWO, "--max-failures=0", cwd=tmp_path)
    assert driver.code() == 0, driver.output()
    assert driver.output().count("All ranks resume") == 2
    assert_same(tmp_path, two_ranks)


def test_a_host_that_loses_ranks_again_and_again_is_not_used_again(cluster, two_ranks, tmp_path):
    """Two ranks that supervisors start again, until a host has lost too many; the other one has room for both."""
    words = (*FIT, faults({"rank": 1, "step": 7}, {"rank": 1, "step": 20}), "--recover.restarts=5", "--recover.strikes=2")
    driver = cluster.start(*words, *TWO, cwd=tmp_path)
    assert driver.code() == 0, driver.output()
    report = driver.output()
    line = r"(h\d) has lost ranks 2 times within an hour. All ranks end: Ray starts them again without \1\.\n"
    bad = re.findall(line, report)
    assert re.findall(r"Ray starts the workers again without (h\d)\.\n", report) == bad, report
    assert re.findall(r"2 workers on (h\d) x 2\n", report) == [{"h1": "h2", "h2": "h1"}[bad[0]]], report
    assert "failure 1" not in report
    assert_same(tmp_path, two_ranks)


def test_a_host_that_is_unfit_when_it_is_to_join_again_is_not_used(cluster, two_ranks, tmp_path):
    """Without a supervisor's restarts, so Ray starts all again. Only the host that has lost its rank is checked."""
    (tmp_path / "unfit").write_text("h1 h2")
    driver = cluster.start(*FIT, faults({"rank": 1, "step": 7}), *TWO, cwd=tmp_path)
    assert driver.code() == 0, driver.output()
    report = driver.output()
    (bad,) = re.findall(r"Ray starts the workers again without (h\d)\.\n", report)
    assert re.findall(r"rank 1 on (h\d): SIGKILL\.\n", report) == [bad], report
    assert re.findall(r"(h\d) is unfit, and does not join the run: a file in \S+: Input/output error", report) == [bad], report
    assert re.findall(r"2 workers on (h\d) x 2\n", report) == [{"h1": "h2", "h2": "h1"}[bad]], report
    assert_same(tmp_path, two_ranks)


@pytest.mark.faults
def test_without_room_elsewhere_a_host_is_used_again(cluster, two_ranks, tmp_path):
    """Each rank needs a host of its own. The driver's failures are not spent on that."""
    words = (*FIT, faults({"rank": 1, "step": 7}), "--recover.restarts=5", "--recover.strikes=1", "--max-failures=0")
    driver = cluster.start(*words, "--workers=2", "--placement=STRICT_SPREAD", "--run=it", cwd=tmp_path)
    assert driver.code() == 0, driver.output()
    assert re.search(r"There is no room without h\d: Ray may use it again\.", driver.output()), driver.output()
    assert_same(tmp_path, two_ranks)


@pytest.mark.faults
def test_a_host_is_lost_and_comes_back(cluster, two_ranks, tmp_path):
    driver = cluster.start(
        *FIT, slowly(0.05, crawl_from=20), "--workers=2", "--placement=STRICT_SPREAD", "--run=it", cwd=tmp_path
    )
    comes_to(tmp_path, 10, driver)
    cluster.lose(1)
    driver.says("rank ")
    driver.says("Ray starts the workers again (failure 1 of 3)")
    cluster.start_node(1)
    driver.says("Resumes from")
    (tmp_path / "hurry").touch()
    assert driver.code() == 0, driver.output()
    assert_same(tmp_path, two_ranks)


def test_a_host_is_taken_away_with_notice(cluster, two_ranks, tmp_path):
    """A preemption: the training saves, and goes on elsewhere at once."""
    driver = cluster.start(*FIT, slowly(0.05, crawl_from=15), *TWO, "--max-failures=0", cwd=tmp_path)
    comes_to(tmp_path, 10, driver)
    cluster.drain(1, seconds=120)
    driver.says("Stopped by SIGTERM after step")
    driver.says("h2 is taken away")
    driver.says("2 workers on h1 x 2")
    driver.says("Resumes from")
    (tmp_path / "hurry").touch()
    assert driver.code() == 0, driver.output()
    assert_same(tmp_path, two_ranks)
    cluster.lose(1)


def test_a_run_shrinks_when_a_host_is_lost_and_grows_when_it_is_back(alone, cluster, tmp_path):
    words = ("--workers=2", "--min-workers=1", "--cpus=2", "--run=it")
    driver = cluster.start(*FIT, slowly(0.05, crawl_from=20), *words, cwd=tmp_path, eager=True)
    driver.says("Ray: 2 workers on ")  # perhaps not at its start
    comes_to(tmp_path, step(tmp_path) + 5, driver)
    before, began = driver.output(), time.monotonic()
    cluster.lose(1)
    driver.says("rank 0 on h2 is lost: " if "2 workers on h2" in before else "rank 1 on h2 is lost: ")
    driver.says("Ray: 1 worker on h1", after=before)
    driver.says("Resumes from", after=before)
    took("a lost host: on with one worker after", time.monotonic() - began)
    before, began = driver.output(), time.monotonic()
    cluster.start_node(1)
    driver.says("Ray: 2 workers on ", after=before)
    driver.says("Resumes from", after=before)
    took("it is back: on with two workers after", time.monotonic() - began)
    (tmp_path / "hurry").touch()
    assert driver.code() == 0, driver.output()
    assert_same_curve(tmp_path, alone)


RATES = [0.001, 0.05, 0.0005]
SWEEP = {"metric": "val/loss", "mode": "min", "together": 2, "keys": {"model.optimizer.init_args.lr": RATES}}


@pytest.mark.faults
def test_a_search_whose_metric_is_wrong_is_refused_by_name(cluster, tmp_path):
    (tmp_path / "sweep.yaml").write_text(json.dumps(SWEEP | {"metric": "val/los"}))
    driver = cluster.start(*FIT, "--run=it", "--tune=sweep.yaml", cwd=tmp_path)
    assert driver.code() == 2, driver.output()
    assert "there is no such metric. Did you mean val/loss?" in driver.output()
    assert not list(tmp_path.glob("lightning_logs/*"))


def test_a_search_with_a_trial_that_is_killed(cluster, tmp_path):
    """Three trials, two at a time. The second one is killed, and resumes from its checkpoint; where ASHA stops it then, it goes
    on without Ray to the same bits as one that nothing happened to. The key of a service goes to the trials, and into no file.
    """
    (tmp_path / "sweep.yaml").write_text(json.dumps(SWEEP))
    words = (*FIT, "--trainer.threads=1")
    key = secrets.token_hex()
    search = ("--run=it", "--tune=sweep.yaml", "--cpus=2")
    driver = cluster.start(*words, slowly(0.05, crawl_from=20), *search, cwd=tmp_path, env={"WANDB_API_KEY": key})
    driver.says("it-2  step 20  val/loss")
    child = child_of(cluster, "it-2")
    assert f"WANDB_API_KEY={key}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    os.kill(child, signal.SIGKILL)
    driver.says("it-2  Ray starts the workers again (failure 1 of 3)")
    (tmp_path / "hurry").touch()
    assert driver.code() == 0, driver.output()
    assert "Resumes from" in (tmp_path / "lightning_logs/it-2/log.txt").read_text()
    ends = [f"it-{number}  ends after step" for number in (1, 2, 3)]
    assert all(driver.output().count(line) == 1 for line in ends), driver.output()
    assert driver.output().count("it-2  step 20  val/loss") == 1  # also where it is read again
    assert driver.output().count("best        it-2: val/loss") == 1
    assert Path(driver.output().rpartition("checkpoint  ")[2].strip()).is_file()
    without(key, cluster, tmp_path)
    for run in (
        ("--sweep=sweep.yaml", "--trial=2", "--run=it"),
        ("--run=by-hand", f"--model.optimizer.init_args.lr={RATES[1]}"),
    ):
        ended = forked(tmp_path, *words, *run)
        assert ended.code == 0, ended.output
    assert same(weights(tmp_path, "it-2"), weights(tmp_path, "by-hand"))


def without(key: str, cluster: RayHosts, folder: Path) -> None:
    """The key of a service is in none of the files that the run and Ray have written."""
    written = [file for place in (folder, cluster.session) for file in place.rglob("*") if file.is_file()]
    assert len(written) > 10
    assert not [file for file in written if key.encode() in file.read_bytes()]


def child_of(cluster: RayHosts, run: str) -> int:
    """The training of a run."""
    for pid in (pid for index in (0, 1) for pid in cluster.children(index)):
        if run.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"nobody trains {run}")
