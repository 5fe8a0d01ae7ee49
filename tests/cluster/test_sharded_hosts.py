"""trainer.strategy=sharded over hosts: with shard=node each host has a copy, which its ranks share. Lost ranks are replaced."""

import json

import pytest

from tests.cluster.machine import LONG, wait_until
from tests.cluster.test_hosts import launch, printed
from tests.cluster.training import slowly, step
from tests.conftest import forked
from tests.own import write_texts
from tests.survive.test_resume import curves, same
from tests.train.test_sharded import EXACT, GATHER, RUNS, furthest, sharded, weights

pytestmark = pytest.mark.slow

FLOAT64 = ("--trainer.precision=64-true", f"--trainer.callbacks={json.dumps([GATHER])}")
KILLS = [
    {"class_path": "tests.probes.Fault", "init_args": init}
    for init in ({"rank": 3, "step": 5}, {"rank": 0, "step": 8, "where": "accumulation"})
]
RECOVER = ("--recover.restarts=3", "--recover.every_n_steps=2")


@pytest.mark.parametrize("shard", ["node", pytest.param("full", marks=pytest.mark.faults)])
def test_two_hosts_of_two_ranks_have_the_weights_of_one_process(hosts, tmp_path, shard):
    """Also where two of them are killed: with shard=node the second host reads what the first one has kept in its memory."""
    write_texts(tmp_path / "texts")
    (alone := tmp_path / "alone").mkdir()
    (folder := tmp_path / shard).mkdir()
    done = forked(alone, *RUNS["gpt"], *FLOAT64)
    assert done.code == 0, done.output
    words = [argument for argument in RUNS["gpt"] if not argument.startswith("--trainer.devices")]
    words += [*FLOAT64, sharded(shard=shard), "--trainer.devices=2", *RECOVER]
    words += [f"--trainer.callbacks+={json.dumps(KILLS)}"]
    running = [launch(host, folder, *words, nodes=2, NPROC_PER_NODE="2") for host in hosts[:2]]
    codes = [each.wait(LONG) for each in running]
    assert codes == [0, 0], printed(folder)
    output = (folder / "h1.txt").read_text()
    assert output.count("2 hosts x 2 processes") == 3
    assert output.count("Resumes from /dev/shm/samerun-state-") == 2
    actual, expected = weights(folder), weights(alone)
    assert actual["spread"]
    assert not expected["spread"]
    difference = furthest(actual["module"], expected["module"])
    print(f"shard={shard}: the weights differ from one process's by {difference:.1e}")
    assert difference < 1e-12


@pytest.mark.parametrize("lost", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_a_lost_hosts_shards_are_in_the_memory_of_the_next(hosts, tmp_path, lost):
    """No checkpoint lies on the disk yet: the others resume from memory, to the bits of one process. Where two are lost at
    once, with the only copies of a shard, the run begins anew.
    """
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    words = [argument for argument in RUNS["regression"] if not argument.startswith("--trainer.devices")]
    words += [EXACT, "--data.init_args.size=700", "--checkpoints.every_n_steps=500"]
    done = forked(alone, *words, "--trainer.devices=1", f"--trainer.callbacks={json.dumps([GATHER])}")
    assert done.code == 0, done.output
    slow = json.loads(slowly(0.05, crawl_from=25).partition("=")[2])
    words += [sharded(shard="full"), *RECOVER, f"--trainer.callbacks={json.dumps([GATHER, *slow])}"]
    running = [launch(host, together, *words, nodes="1:3") for host in hosts]
    wait_until(lambda: step(together) >= 15, LONG, lambda: printed(together))
    for host in hosts[3 - lost :]:
        host.kill()
    line = "The run resumes without" if lost == 1 else "All ranks resume (restart"
    wait_until(lambda: line in (together / "h1.txt").read_text(), LONG, lambda: printed(together))
    (together / "hurry").touch()
    assert [each.wait(LONG) for each in running[: 3 - lost]] == [0] * (3 - lost), printed(together)
    speaker = (together / "h1.txt").read_text()
    assert speaker.count("The run resumes without") >= 1
    assert speaker.count("Resumes from /dev/shm/samerun-state-") >= 1
    assert speaker.count("is not complete: no host has the part of rank(s)") == lost - 1
    assert speaker.count("All ranks resume (restart") == lost - 1
    actual, expected = weights(together), weights(alone)
    assert actual.pop("spread") is (lost == 1)
    assert not expected.pop("spread")
    assert same(actual, expected)
    assert curves(together) == curves(alone)
