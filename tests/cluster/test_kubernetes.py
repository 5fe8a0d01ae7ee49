"""What the pods of a manifest would see, run for real: killed, drained, replaced under another address; and the same curve."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.hosts import Host, Hosts
from tests.cluster.kubernetes import Cluster
from tests.cluster.manifests import documents, job_of
from tests.cluster.training import FIT, assert_same_curve, step
from tests.conftest import Run, forked
from tests.survive.test_resume import same

pytestmark = pytest.mark.slow

IMAGE = "registry.example/project@sha256:" + "0" * 64
# A test need not be as patient as a cluster.
HURRY = {"RDZV_CONF": "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """So many that no pod has one that another had before it."""
    with Hosts(16, tmp_path_factory.mktemp("addresses")) as made:
        yield made


@pytest.fixture
def hosts(addresses: Hosts) -> Iterator[list[Host]]:
    yield list(addresses)
    addresses.kill()


def manifest(folder: Path, *words: str) -> dict[str, dict[str, Any]]:
    """What `python -m project manifest` writes, by kind, for pods without a GPU."""
    done = forked(folder, "manifest", *words, "--gpus=0", f"--image={IMAGE}", "--run=it", "--out=manifest.yaml")
    assert done.code == 0, done.output
    return documents((folder / "manifest.yaml").read_text())


def slowly(seconds: float) -> str:
    """As in tests.cluster.training, with the ledger among the runs: nothing else can be written to."""
    ledger = {"class_path": "tests.probes.Ledger", "init_args": {"pause": seconds, "folder": "lightning_logs"}}
    return "--trainer.callbacks=" + json.dumps([ledger])


def without_doctor(job: dict[str, Any]) -> dict[str, Any]:
    """It has a test of its own, and takes its time at each start."""
    del job["spec"]["template"]["spec"]["initContainers"]
    return job


def assert_one_curve(folder: Path, runs: Path, expected: dict[int, float]) -> None:
    result = folder / "result"
    (result / "lightning_logs").mkdir(parents=True)
    (result / "lightning_logs/it").symlink_to(runs / "it")
    assert_same_curve(result, expected)


def test_pods_are_killed_drained_and_replaced_and_the_curve_is_one(alone, hosts, tmp_path):
    """Of three pods, one loses its node; another's is drained; then the first pod, which holds all together, is lost."""
    found = manifest(tmp_path, *FIT[1:], slowly(0.05), "--nodes=3")
    with Cluster(hosts, tmp_path, without_doctor(job_of(found)), **HURRY) as cluster:
        runs = cluster.claim("it-runs")

        def trains_on(steps: int) -> None:
            reached = step(runs)
            cluster.wait_for(lambda: step(runs) >= reached + steps, 150)

        trains_on(8)
        assert "3 hosts x 1 process x micro-batch 4 x accumulation 2" in cluster.log()
        before = dict(cluster.pods)

        cluster.pods[2].disrupted = True  # its node is gone
        cluster.pods[2].kill()
        trains_on(8)
        assert [(one.index, one.code, one.action) for one in cluster.ended] == [(2, 137, "Ignore")]
        assert cluster.pods[0] is before[0]  # it was replaced alone
        assert cluster.pods[1] is before[1]
        assert cluster.pods[2].address != before[2].address
        assert cluster.log().count("Goes on from") == 1

        cluster.pods[1].delete(disrupted=True)
        trains_on(8)
        assert [(one.index, one.code, one.action) for one in cluster.ended[1:]] == [(1, 143, "Ignore")]
        assert cluster.log().count("Stopped by SIGTERM after step") >= 1
        assert cluster.pods[0] is before[0]

        cluster.pods[0].kill()  # of it nobody says that it was disrupted: it counts
        trains_on(8)
        assert {(one.index, one.code, one.action) for one in cluster.ended[2:]} == {
            (0, 137, "Count"),
            (1, 75, "Ignore"),
            (2, 75, "Ignore"),
        }
        assert "the agents of this run have lost each other" in cluster.log()
        (runs / "hurry").touch()
        assert cluster.wait(150) == "Complete"
        assert cluster.failures == {0: 1}
    assert "Traceback" not in cluster.log()
    assert_one_curve(tmp_path, runs, alone)


@pytest.mark.faults
def test_a_drained_pod_that_does_not_end_in_its_grace_is_killed_and_replaced(alone, hosts, tmp_path):
    """Its rank hangs. Of the three pods it alone is replaced, and what was saved before is gone on with."""
    found = manifest(tmp_path, *FIT[1:], slowly(0.05), "--nodes=3")
    job = without_doctor(job_of(found))
    job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5
    with Cluster(hosts, tmp_path, job, **HURRY) as cluster:
        runs = cluster.claim("it-runs")
        cluster.wait_for(lambda: step(runs) >= 8, 150)
        before = dict(cluster.pods)
        before[1].freeze()
        before[1].delete(disrupted=True)
        cluster.wait_for(lambda: cluster.ended, 30)
        assert [(one.index, one.code, one.action) for one in cluster.ended] == [(1, 137, "Ignore")]
        cluster.wait_for(lambda: cluster.log().count("Goes on from") == 1, 150)
        assert (cluster.pods[0], cluster.pods[2]) == (before[0], before[2])
        (runs / "hurry").touch()
        assert cluster.wait(150) == "Complete"
        assert not cluster.failures
    assert_one_curve(tmp_path, runs, alone)


@pytest.mark.faults
def test_a_pod_is_lost_for_good_and_the_others_go_on_without_it(alone, hosts, tmp_path):
    """Of three, by `--nodes 2:3`; the Job makes another pod, and no node has room for it."""
    found = manifest(tmp_path, *FIT[1:], slowly(0.05), "--nodes=2:3")
    with Cluster(hosts, tmp_path, without_doctor(job_of(found)), **HURRY) as cluster:
        runs = cluster.claim("it-runs")
        cluster.wait_for(lambda: step(runs) >= 8, 150)
        assert "3 hosts x 1 process x micro-batch 4 x accumulation 2" in cluster.log()
        before = dict(cluster.pods)
        cluster.unschedulable.add(2)
        before[2].disrupted = True
        before[2].kill()
        cluster.wait_for(lambda: "2 hosts x 1 process x micro-batch 4 x accumulation 3" in cluster.log(), 150)
        assert cluster.log().count("Goes on from") == 1
        (runs / "hurry").touch()
        assert cluster.wait(150) == "Complete"
        assert [(one.index, one.code) for one in cluster.ended[:1]] == [(2, 137)]
        assert sorted(one.index for one in cluster.ended[1:]) == [0, 1]  # they were not replaced
        assert {one.code for one in cluster.ended[1:]} <= {0, 143}
    assert "Traceback" not in cluster.log()
    assert_one_curve(tmp_path, runs, alone)


def test_a_trainjob_whose_pods_are_all_replaced_is_the_same_run_to_the_last_bit(hosts, tmp_path):
    """A pod of three is lost: by their exit codes all are replaced. Another is lost, and JobSet makes the Job anew."""
    (whole := tmp_path / "whole").mkdir()
    uninterrupted = forked(whole, *FIT, ranks=3)
    assert uninterrupted.code == 0, uninterrupted.output
    job = without_doctor(job_of(manifest(tmp_path, *FIT[1:], slowly(0.05), "--engine=trainjob", "--nodes=3")))
    free = iter(hosts)
    with Cluster(free, tmp_path, job, **HURRY) as cluster:
        runs = cluster.claim("it-runs")
        cluster.wait_for(lambda: step(runs) >= 8, 150)
        before = dict(cluster.pods)
        before[1].kill()
        cluster.wait_for(lambda: cluster.log().count("Goes on from") == 1, 150)
        ended = {(one.index, one.code, one.action) for one in cluster.ended}
        ended.discard((1, 75, "Ignore"))  # a new pod 1 that came before the others had left
        assert ended == {(0, 75, "Ignore"), (1, 137, "Count"), (2, 75, "Ignore")}
        reached = step(runs)
        cluster.wait_for(lambda: step(runs) >= reached + 8, 150)
        cluster.pods[1].kill()
        cluster.delete()
        assert cluster.wait(60) == "Deleted"
        assert {one.code for one in cluster.ended[3:]} <= {75, 137, 143}
    with Cluster(free, tmp_path, job, **HURRY) as anew:
        anew.wait_for(lambda: anew.log().count("Goes on from") == 2, 150)
        assert not {one.address for one in anew.pods.values()} & {one.address for one in before.values()}
        (runs / "hurry").touch()
        assert anew.wait(150) == "Complete"
    assert "Traceback" not in anew.log()
    assert_one_curve(tmp_path, runs, uninterrupted.curve("train/loss"))
    assert Run(0, "", tmp_path / "result").events("train/loss") == uninterrupted.events("train/loss")
    ours, theirs = (
        torch.load(max(folder.glob("checkpoints/*.ckpt")), weights_only=True) for folder in (runs / "it", *uninterrupted.runs)
    )
    for part in ("state_dict", "optimizer_states"):
        assert same(ours[part], theirs[part]), part


def test_a_wrong_key_ends_the_job_and_no_restart_is_spent_on_it(hosts, tmp_path):
    """The launchers may start their workers again three times, and the Job its pod six times."""
    found = manifest(tmp_path, *FIT[1:], "--nodes=1")
    job = without_doctor(job_of(found))
    job["spec"]["template"]["spec"]["containers"][0]["args"].append("--trainer.max_epoch=3")
    with Cluster(hosts, tmp_path, job, **HURRY) as cluster:
        assert cluster.wait(120) == "Failed"
    assert (cluster.ended[0].code, cluster.ended[0].action) == (2, "FailJob")
    assert cluster.log().count("Did you mean trainer.max_epochs?") == 1
    assert "Traceback" not in cluster.log()


def test_a_pod_that_is_not_fit_does_not_train_and_its_successor_does(alone, hosts, tmp_path):
    """/dev/shm is too small for the loaders' workers, and then it is not. With Kubeflow's words for who is who."""
    words = [one for one in FIT[1:] if "num_workers" not in one]
    found = manifest(tmp_path, *words, "--data.num_workers=3", "--engine=trainjob", "--nodes=2")
    job = job_of(found)
    (shm,) = [one for one in job["spec"]["template"]["spec"]["volumes"] if one["name"] == "shm"]
    right, shm["emptyDir"]["sizeLimit"] = shm["emptyDir"]["sizeLimit"], "4Ki"
    with Cluster(hosts, tmp_path, job, **HURRY) as cluster:
        runs = cluster.claim("it-runs")
        cluster.wait_for(lambda: {one.index for one in cluster.ended} == {0, 1}, 150)
        shm["emptyDir"]["sizeLimit"] = right
        assert {(one.container, one.code, one.action) for one in cluster.ended} == {("doctor", 1, "Count")}
        assert cluster.log().count("│ limits       │ bad") >= 2
        for index in (0, 1):
            (said,) = (runs / ".doctor/lightning_logs").glob(f"it-{index}/doctor.json")
            assert "of /dev/shm, and the loaders' workers take" in said.read_text()
        assert not (runs / "it").exists()
        assert cluster.wait(400) == "Complete"
    # The Job is complete with pod 0: the other one may just be told so.
    assert {one.code for one in cluster.ended if one.container != "doctor"} <= {0, 143}
    assert "2 hosts x 1 process x micro-batch 4 x accumulation 3" in cluster.log()
    assert_one_curve(tmp_path, runs, alone)


def test_a_signal_while_a_pod_waits_for_the_first_ones_name_ends_it_at_once(hosts, tmp_path):
    """Its grace is two minutes."""
    found = manifest(tmp_path, *FIT[1:], "--nodes=2")
    job = without_doctor(job_of(found))
    with Cluster(hosts, tmp_path, job, **HURRY) as cluster:
        cluster.unschedulable.add(0)
        cluster.wait_for(lambda: "waiting for the name it-0.it" in cluster.log(1), 60)
        pod = cluster.pods[1]
        pod.delete()
        assert pod.process is not None
        assert pod.process.wait(10) == -signal.SIGTERM
        cluster.wait_for(lambda: cluster.ended, 10)
        assert (cluster.ended[0].code, cluster.ended[0].action) == (143, "Ignore")
