"""A real Slurm: srun and scripts/slurm.sbatch on two nodes, and a job that is put back into the queue in every way there is."""

import re
import shlex
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.cluster.machine import LONG, wait_until
from tests.cluster.training import FIT, RECOVER, STEPS, assert_same_curve, slowly, step
from tests.conftest import ROOT, TINY, environment, forked, took
from tests.survive.test_resume import faults, same

pytestmark = pytest.mark.slow


def settings() -> dict[str, str]:
    return environment(PROJECT_PYTHON=sys.executable, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="eth0")


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.faults), 2])
def test_a_task_that_is_killed_is_replaced_by_its_supervisor(alone, slurm, tmp_path, nodes):
    """The job stays: srun sees no task end. Rank 1 is killed, and then rank 0. It is the run of one process."""
    places = (f"--nodes={nodes}", f"--ntasks-per-node={2 // nodes}")
    command = ("srun", *places, sys.executable, "-m", "project", *FIT, *RECOVER)
    output = slurm.run(*command, cwd=tmp_path, env=settings())
    assert output.count("All ranks resume (restart") == 2, output
    if nodes == 2:
        assert "2 hosts x 1 process x micro-batch 4 x accumulation 3" in output
        assert "MASTER_ADDR=10.77.0.1: the name n1 does not resolve" in output  # anywhere
    assert f"Rank 1 on h{nodes} was killed by signal 9. All ranks resume (restart 1 of 3)." in output, output
    assert_same_curve(tmp_path, alone)


def test_a_job_whose_node_loses_ranks_again_and_again_is_started_without_it(alone, slurm, tmp_path):
    """The second of two nodes loses its rank twice, which is all that `recover.restarts` allows. The third is unfit. There is a
    fourth.
    """
    (tmp_path / "unfit").write_text("h3")
    words = (*FIT[1:], faults({"rank": 1, "step": 7}, {"rank": 1, "step": 20}), "--recover.restarts=1", "--recover.strikes=2")
    variables = settings()
    variables["PYTHONPATH"] += f":{ROOT}/tests/cluster/broken_disk"
    job = slurm.submit(str(ROOT / "scripts/slurm.sbatch"), *words, cwd=tmp_path, env=variables)
    log = tmp_path / f"slurm-{job}.log"
    why = partial(slurm.why, job, log)
    wait_until(lambda: slurm.job(job)["JobState"] in ("COMPLETED", "FAILED"), LONG, why, every=0.3)
    (line,) = [line for line in log.read_text().splitlines() if "h2 has lost ranks 2 times within an hour" in line]
    assert line.endswith("The job is back in the queue. When this run requeues the job, Slurm starts it without n2."), why()
    shown = slurm.job(job)
    assert [shown[name] for name in ("JobState", "Restarts")] == ["COMPLETED", "2"], why()
    assert [shown[name] for name in ("NodeList", "ExcNodeList")] == ["n[1,4]", "n2,n3"], why()
    unfit = "h3 is unfit, and does not join the run: a file in /dev/shm: Input/output error."
    lines = log.read_text().splitlines()
    assert unfit in lines, why()
    assert "The job goes back into the queue: Slurm starts it without n3." in lines, why()
    assert_same_curve(tmp_path, alone)
    assert [*tmp_path.glob("lightning_logs/.*")] == []


@pytest.mark.faults
@pytest.mark.parametrize("words", [["--exclude=n[3-4]"], ["--nodelist=n1,n2"], ["--no-requeue"]])
def test_a_job_that_would_wait_for_other_nodes_for_ever_is_not_requeued(slurm, tmp_path, words):
    lost = faults({"rank": 1, "step": 7}, {"rank": 1, "step": 20})
    given = (*words, str(ROOT / "scripts/slurm.sbatch"), *FIT[1:], lost, "--recover.restarts=1", "--recover.strikes=2")
    job = slurm.submit(*given, cwd=tmp_path, env=settings())
    log = tmp_path / f"slurm-{job}.log"
    wait_until(lambda: slurm.job(job)["JobState"] == "FAILED", LONG, partial(slurm.why, job, log), every=0.3)
    assert "(recover.restarts): not restarted. The same command resumes the run" in log.read_text()
    assert slurm.job(job)["Restarts"] == "0"


def test_the_page_for_beginners_submits_what_trains(slurm, tmp_path):
    line = "sbatch --nodes=2 scripts/slurm.sbatch --config configs/ddp.yaml"
    page = (ROOT / "docs/howto/slurm.md").read_text()
    assert f"\n{line}\n" in page
    _, nodes, script, *words = line.split()
    job = slurm.submit(nodes, str(ROOT / script), *words, *TINY, "--trainer.max_epochs=1", cwd=tmp_path, env=settings())
    wait_until(lambda: slurm.job(job)["JobState"] in ("COMPLETED", "FAILED"), LONG, slurm.logs, every=0.3)
    log = (tmp_path / f"slurm-{job}.log").read_text()
    assert "2 hosts x 1 process x micro-batch 16 x accumulation 4 = global batch 128" in log, log
    assert "2 hosts x 1 process x micro-batch 16 x accumulation 4 = global batch 128" in page
    assert (tmp_path / f"lightning_logs/ddp-{job}/report.html").exists()


@pytest.mark.faults
def test_tasks_and_gpus_that_do_not_fit_are_refused_before_the_start(slurm, tmp_path):
    """As many GPUs as Slurm says (there are none), and one task for them, as if it were Lightning that starts the others."""
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--kill-on-bad-exit=1"]
    output = slurm.run(*command, sys.executable, "-m", "project", *FIT, cwd=tmp_path, env=settings(), check=False)
    assert output.count("Slurm gave this job 2 GPU(s) on each node, and srun started 1 task(s)") == 1, output
    assert "Exited with exit code 2" in output
    assert "\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n#SBATCH --gpus-per-node=2\n" in output
    assert "Traceback" not in output


@pytest.mark.faults
def test_a_heterogeneous_job_is_refused_and_one_of_its_components_trains(alone, slurm, tmp_path):
    """Batch scripts with '#SBATCH hetjob': by all of it, and with what the refusal says, by the component of two nodes."""
    script = tmp_path / "job.sbatch"
    wants = ("--nodes=1", "--ntasks-per-node=1", "hetjob", "--nodes=2", "--ntasks-per-node=1")
    head = "#!/bin/bash\n" + "".join(f"#SBATCH {want}\n" for want in wants)
    program = shlex.join([sys.executable, "-m", "project", *FIT])
    script.write_text(
        f"{head}srun --het-group=0,1 {program} > all.txt 2>&1\necho $? >> all.txt\n"
        f"srun --het-group=1 env -u SLURM_HET_SIZE {program} > one.txt 2>&1\necho $? >> one.txt\n"
    )
    job = slurm.submit("--wait", str(script), cwd=tmp_path, env=settings())
    refused, trained = (tmp_path / "all.txt").read_text(), (tmp_path / "one.txt").read_text()
    assert refused.count(f"Slurm job {job} is a heterogeneous job of 2 components (n1; n[2-3])") == 1, refused
    assert refused.endswith("\n2\n")
    assert "Traceback" not in refused
    assert "2 hosts x 1 process x micro-batch 4 x accumulation 3" in trained, trained
    assert_same_curve(tmp_path, alone)


@pytest.mark.faults
def test_a_job_array_trains_a_sweep_and_a_task_that_is_put_back_goes_on_with_its_trial(slurm, tmp_path):
    """One process each: what Slurm starts again takes up its own run, and comes to the same weights as by hand."""
    (tmp_path / "sweep.yaml").write_text("keys: {model.optimizer.init_args.lr: [0.01, 0.02], seed_everything: [5]}")
    words = [*FIT[1:], "--trainer.threads=1", "--sweep=sweep.yaml"]
    array = ("--array=1-2", "--nodes=1", "--output=%a.log", str(ROOT / "scripts/slurm.sbatch"))
    job = slurm.submit(*array, *words, slowly(0.2), cwd=tmp_path, env=settings())

    def why() -> str:
        output = "".join(file.read_text() for file in tmp_path.glob("?.log"))
        return f"{[slurm.job(f'{job}_{task}') for task in (1, 2)]}\n{output}\n{slurm.logs()}"

    first, second = (tmp_path / f"lightning_logs/ddp-{job}_{task}" for task in (1, 2))
    wait_until(lambda: all([*run.glob("checkpoints/step-*.ckpt")] for run in (first, second)), LONG, why)
    slurm.run("scancel", "--signal=USR1", f"{job}_2")
    wait_until(lambda: slurm.job(f"{job}_2")["Restarts"] == "1", LONG, why, every=0.3)
    (tmp_path / "hurry").touch()
    wait_until(lambda: all(slurm.job(f"{job}_{task}")["JobState"] == "COMPLETED" for task in (1, 2)), LONG, why, every=0.3)
    assert "Trial: --model.optimizer.init_args.lr=0.02 --seed_everything=5" in (tmp_path / "2.log").read_text()
    assert (tmp_path / "2.log").read_text().count("Resumes from") == 1, why()
    by_hand = forked(
        tmp_path, *FIT, "--trainer.threads=1", "--run=by-hand", "--model.optimizer.init_args.lr=0.02", "--seed_everything=5"
    )
    assert by_hand.code == 0, by_hand.output

    def weights(folder: Path) -> object:
        return torch.load(max(folder.glob("checkpoints/*.ckpt")), weights_only=True)["state_dict"]

    assert same(weights(second), weights(tmp_path / "lightning_logs/by-hand"))
    assert not same(weights(second), weights(first))


def test_a_job_is_put_back_by_its_time_limit_by_preemption_and_by_a_lost_node(alone, slurm, tmp_path):
    """And goes on each time, with one rank slower than the other and a slow disk. COMPLETED when it is, and not before."""
    script = tmp_path / "job.sbatch"
    script.write_text((ROOT / "scripts" / "slurm.sbatch").read_text().replace("USR1@60", "USR1@1"))
    words = (*FIT[1:], slowly(0.01, rank_1=0.2, disk=2, crawl_from=25))
    job = slurm.submit("--exclude=n4", str(script), *words, cwd=tmp_path, env=settings())
    log = tmp_path / f"slurm-{job}.log"

    def state() -> tuple[str, ...]:
        shown = slurm.job(job)
        return shown["JobState"], shown["Restarts"], shown["NodeList"]

    why = partial(slurm.why, job, log)

    def trains(restarts: int, nodes: str = "n[1-2]", after: str = "") -> None:
        """After so many restarts it runs, and comes two steps further."""
        began = time.monotonic()
        wait_until(lambda: state() == ("RUNNING", str(restarts), nodes), LONG, why, every=0.3)
        reached = step(tmp_path)
        wait_until(lambda: step(tmp_path) >= reached + 2, LONG, why)
        assert state() == ("RUNNING", str(restarts), nodes), why()
        if after:
            took(f"{after}: the job trains again after", time.monotonic() - began)

    trains(0)
    slurm.run("scancel", "--signal=USR1", job)  # what slurmctld does when the limit is near
    trains(1, after="a signal before the time limit")
    slurm.run("srun", "--partition=urgent", "--nodes=3", "--exclude=n4", "--exclusive", "true")
    trains(2, after="preemption")
    assert log.read_text().count("Stopped by SIGUSR1 after step") == 2
    cut_short = r"A checkpoint takes ([2-9]|\d\d) s, and after a signal this job has 1 s: it would be cut short\."
    assert re.search(cut_short, log.read_text())
    slurm.lose_node(1)
    trains(3, "n[1,3]", after="a lost node")
    assert log.read_text().count("Resumes from") == 3
    (tmp_path / "hurry").touch()
    wait_until(lambda: state()[0] != "RUNNING", LONG, why, every=0.3)
    wait_until(lambda: state()[0] != "COMPLETING", LONG, why, every=0.3)
    assert state()[0] == "COMPLETED", why()
    assert step(tmp_path) == STEPS - 1
    assert_same_curve(tmp_path, alone)


@pytest.mark.faults
def test_a_checkpoint_that_takes_longer_than_the_lead_does_not_end_the_job(slurm, tmp_path):
    """A time limit of a minute, and a disk that needs it alone: the job goes back before its time is over, and says why."""
    script = [str(ROOT / "scripts" / "slurm.sbatch"), *FIT[1:], slowly(0.2, disk=60, crawl_from=25)]
    job = slurm.submit("--time=1", "--signal=USR1@10", *script, cwd=tmp_path, env=settings())
    log = tmp_path / f"slurm-{job}.log"

    why = partial(slurm.why, job, log)
    wait_until(lambda: slurm.job(job)["Restarts"] == "1" or slurm.job(job)["JobState"] == "TIMEOUT", LONG, why, every=0.3)
    (tmp_path / "hurry").touch()
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    assert f"before the end of Slurm job {job}, and the checkpoint takes longer: it is cut short" in log.read_text(), why()
    wait_until(lambda: slurm.job(job)["JobState"] == "COMPLETED", LONG, why, every=0.3)
    assert step(tmp_path) == STEPS - 1
    assert not list(tmp_path.glob("lightning_logs/.requeues-*"))


@pytest.mark.faults
def test_a_job_that_never_comes_to_a_step_is_not_put_back_for_ever(slurm, tmp_path):
    """SIGUSR1 in its start-up, each time: as it names the address, which is before it connects."""
    job = slurm.submit(str(ROOT / "scripts" / "slurm.sbatch"), *FIT[1:], slowly(0.2), cwd=tmp_path, env=settings())
    log = tmp_path / f"slurm-{job}.log"

    why = partial(slurm.why, job, log)
    for start in range(1, 4):
        wait_until(lambda start=start: log.exists() and log.read_text().count("MASTER_ADDR=") == start, LONG, why)
        slurm.run("scancel", "--signal=USR1", job)
    wait_until(lambda: slurm.job(job)["JobState"] == "FAILED", LONG, why, every=0.3)
    assert "is NOT put back into the queue: it was started 3 times and came to no new checkpoint" in log.read_text(), why()
    assert slurm.job(job)["Restarts"] == "2"
