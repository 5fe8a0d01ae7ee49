"""trainer.strategy=sharded over hosts: with shard=node each host has a copy, which its ranks share."""

import json

import pytest

from tests.cluster.test_hosts import launch, printed
from tests.conftest import forked
from tests.own import write_texts
from tests.train.test_sharded import GATHER, RUNS, furthest, sharded, weights

pytestmark = pytest.mark.slow

FLOAT64 = ("--trainer.precision=64-true", f"--trainer.callbacks={json.dumps([GATHER])}")


def on_two_hosts(hosts, folder, *words):
    """Two ranks on each."""
    folder.mkdir()
    usual = [one for one in RUNS["gpt"] if not one.startswith("--trainer.devices")]
    running = [
        launch(host, folder, *usual, *FLOAT64, *words, "--trainer.devices=2", nodes=2, NPROC_PER_NODE="2") for host in hosts[:2]
    ]
    codes = [one.wait(300) for one in running]
    assert codes == [0, 0], printed(folder)
    assert "2 hosts x 2 processes" in (folder / "h1.txt").read_text()
    return weights(folder)


@pytest.mark.parametrize("shard", ["node", pytest.param("full", marks=pytest.mark.faults)])
def test_two_hosts_of_two_ranks_have_the_weights_of_one_process(hosts, tmp_path, shard):
    write_texts(tmp_path / "texts")
    (alone := tmp_path / "alone").mkdir()
    done = forked(alone, *RUNS["gpt"], *FLOAT64)
    assert done.code == 0, done.output
    theirs = weights(alone)
    ours = on_two_hosts(hosts, tmp_path / shard, sharded(shard=shard))
    assert ours["spread"]
    assert not theirs["spread"]
    difference = furthest(ours["module"], theirs["module"])
    print(f"shard={shard}: the weights differ from one process's by {difference:.1e}")
    assert difference < 1e-12
