"""The doctor on one host; tests/cluster/test_unfit.py has it on several that are ill."""

import json
import re

import pytest

from project.cluster.facts import compare, different, differing_keys, named
from tests.conftest import TINY

HEALTHY = ("doctor", "--config", "configs/ddp.yaml", *TINY)


def findings(run):
    (folder,) = run.runs
    report = json.loads((folder / "doctor.json").read_text())
    return {found["check"]: found for found in report["findings"]}


@pytest.mark.timed
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_healthy_cluster(cli, ranks):
    run = cli(*HEALTHY, torchrun=ranks)
    found = findings(run)
    assert run.code == 0, run.output
    assert {one["verdict"] for one in found.values()} <= {"good", "warning"}
    checks = {"versions", "hardware", "network", "data", "run's folder", "limits", "clocks", "collectives", "compute"}
    assert set(found) >= checks | {"memory", "loader"} | ({"links", "gradient sync"} if ranks else set())
    for check in found:
        assert len(re.findall(rf"│ {check} ", run.output)) == 1  # one table, by one rank
    assert "rank 1" not in run.output


def test_a_fast_examination_comes_before_a_fit_and_leaves_no_trace_in_it(quick):
    size = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=4"]
    examined = quick("fit", "--config", "configs/ddp.yaml", *TINY, *size, "--doctor=true")
    assert examined.code == 0, examined.output
    curve = examined.curve("train/loss")
    assert "compute" not in findings(examined)
    examined.runs[0].rename(examined.folder / "first")
    plain = quick("fit", "--config", "configs/ddp.yaml", *TINY, *size)
    assert plain.curve("train/loss") == curve


def test_data_that_is_not_there_is_a_finding_and_the_fit_does_not_start(quick, tmp_path):
    (tmp_path / "images").mkdir()
    run = quick("fit", "--config", "configs/imagefolder.yaml", "--data.source.init_args.root=images", "--doctor=true")
    assert run.code == 1, run.output
    assert findings(run)["data"]["verdict"] == "bad"
    assert "images/train" in findings(run)["data"]["text"]
    assert "Traceback" not in run.output
    assert "step" not in run.output


def test_ranks_are_named_by_host():
    hosts = ["h1", "h1", "h2", "h3", "h3", "h3"]
    assert named([2], hosts) == "rank 2 on h2"
    assert named([0, 1, 3, 4, 5], hosts) == "ranks 0 and 1 on h1, ranks 3, 4 and 5 on h3"


def test_what_most_ranks_have_is_what_is_usual():
    facts = [{"torch": "2.15"}, {"torch": "2.15"}, {"torch": "2.14"}]
    assert different(facts, ["h1", "h2", "h3"], ["torch"]) == {"rank 2 on h3: torch 2.14, elsewhere 2.15": [2]}


def test_a_configuration_that_differs_is_shown_by_key():
    ours, theirs = {"trainer": {"max_epochs": 3}, "seed": 0}, {"trainer": {"max_epochs": 2}, "seed": 0}
    assert differing_keys([ours, theirs, ours], ["h1", "h2", "h3"]) == {"rank 1 on h2: trainer.max_epochs 2, elsewhere 3": [1]}


def test_only_what_differs_is_sent_in_full():
    sent = []

    def gather(mine):
        sent.append(mine)
        return [mine, mine]

    facts = dict.fromkeys(
        ("Python", "torch", "CUDA", "NCCL", "lightning", "project", "commit", "sources", "configuration"), "same"
    )
    assert compare(facts, {"large": "configuration"}, ["h1", "h2"], gather) == {}
    assert sent == [facts]
