"""What a process says of where it is, and of the code that it runs."""

import json
import socket
import subprocess

import pytest

from project.cluster import code, place
from project.cluster.environment import SAME, different
from project.cluster.rendezvous import _apart
from project.cluster.shared_folder import file_problem, moved
from project.watch.throughput import Measured, Stragglers
from tests.conftest import TINY

HOST = socket.gethostname()


def test_a_container_s_host_says_its_node():
    assert place.host({}) == place.host({"PROJECT_NODE": HOST}) == HOST
    host = place.host({"PROJECT_NODE": "node-7"})
    assert host == f"{HOST} (on node-7)"
    assert (place.short(host), place.node_of(host)) == (HOST, "node-7")
    assert (place.short("h1#2"), place.node_of("h1#2")) == ("h1#2", "h1#2")
    numbered = _apart([["train-1 (on n)", "boot a"], ["train-1 (on n)", "boot b"]])[1]
    assert (numbered, place.node_of(numbered)) == ("train-1 (on n)#2", "n")


def test_two_pods_of_a_node_are_two_hosts_and_a_figure_has_the_short_name():
    hosts = ["train-0 (on n)", "train-0 (on n)", "train-1 (on n)"]
    assert len(set(_apart([[host, host] for host in hosts]))) == 2
    curves = Stragglers(hosts, 1).by_rank([Measured(0.1, 0.1, 0.1)] * 3)
    assert "ranks/data_ms/0.train-0" in curves


@pytest.mark.parametrize(
    ("before", "now", "fine"),
    [
        ("4f1c (on node-7)", "9ab2 (on node-7)", True),  # a container that was started again on the same machine
        ("train-0 (on node-7)", "train-0 (on node-8)", False),  # the same pod on another one, which has another folder
        ("4f1c", "9ab2", False),
        ("h1", "h1", True),
    ],
)
def test_rank_0_stays_on_its_machine(tmp_path, before, now, fine):
    (tmp_path / ".rank-0").write_text(before)
    problem = moved(tmp_path, 0, [now], lambda value: [value])
    assert (problem is None) == fine, problem
    assert fine or problem[0].startswith(f"Only {before} has this run's folder")


def test_a_checkpoint_that_one_host_does_not_see_or_has_otherwise(tmp_path):
    hosts, path = ["h1", "h2", "h3"], tmp_path / "step-1.ckpt"
    path.write_bytes(b"weights")
    assert file_problem(path, hosts, lambda fingerprint: [fingerprint, fingerprint, fingerprint]) is None
    assert file_problem(path, hosts, lambda fingerprint: [fingerprint, fingerprint, None]).startswith("rank 2 on h3 can't see")
    fingerprints = []
    file_problem(path, hosts, lambda fingerprint: fingerprints.append(fingerprint) or [fingerprint])
    path.write_bytes(b"another")
    assert "rank 1 on h2" in file_problem(path, hosts, lambda fingerprint: [fingerprint, *fingerprints, fingerprint])


def test_ranks_on_different_images_differ_by_name():
    ranks = [dict.fromkeys(SAME, "same") for _ in range(3)]
    ranks[1]["image"] = "project@sha256:b"
    assert different(ranks, ["h1", "h2", "h3"], SAME) == {"rank 1 on h2: image project@sha256:b, elsewhere same": [1]}
    del ranks[1]["image"]  # a version of the project that does not know images
    assert list(different(ranks, ["h1", "h2", "h3"], SAME)) == ["rank 1 on h2: image none, elsewhere same"]


def test_an_image_s_commit_is_that_of_its_code_only(tmp_path):
    package = tmp_path / "project"
    package.mkdir()
    (package / "a.py").write_text("1")
    assert code.commit.__wrapped__(package) == "none"
    code.note("abc1234", package)
    assert code.commit.__wrapped__(package) == "abc1234"
    (package / "a.py").write_text("2")
    assert code.commit.__wrapped__(package) == "abc1234+"
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert code.commit.__wrapped__(package) != "abc1234+"  # a checkout speaks for itself


@pytest.mark.slow
def test_a_run_says_its_image_and_that_it_goes_on_with_another(quick, tmp_path):
    words = ("fit", "--config=configs/ddp.yaml", *TINY, "--run=it", "--checkpoints.every_n_steps=1")
    first = quick(*words, "--trainer.max_steps=1", PROJECT_IMAGE="project@sha256:a")
    assert first.code == 0, first.output
    folder = tmp_path / "lightning_logs/it"
    (start,) = [entry for entry in map(json.loads, (folder / "life.jsonl").open()) if entry["event"] == "start"]
    assert start["image"] == "project@sha256:a"
    assert "project@sha256:a" in (folder / "report.html").read_text()
    assert json.loads(next(folder.glob("checkpoints/*.json")).read_text())["image"] == "project@sha256:a"
    resumed = quick(*words, "--trainer.max_steps=2", PROJECT_IMAGE="project@sha256:a")
    assert resumed.code == 0, resumed.output
    assert "another image" not in resumed.output
    assert "another commit" not in resumed.output
    changed = quick(*words, "--trainer.max_steps=3")
    assert changed.code == 0, changed.output
    assert changed.output.count("continues with another image: project@sha256:a -> none") == 1
