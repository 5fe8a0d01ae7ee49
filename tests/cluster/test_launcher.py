"""What each launcher's environment says, and what can't work."""

import os
from datetime import datetime

import pytest

from project.cluster.place import process_started
from project.launch import launcher
from project.launch.launcher import LaunchError, detect

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "RANK": "5"}
# As slurmd of Slurm 22.05 sets it for task 3 of `srun --nodes=2 --ntasks-per-node=2`.
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
}


def test_python_leaves_it_to_the_yaml():
    for launch in (detect({}), detect({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"})):
        assert (launch.kind, launch.nodes, launch.processes, launch.world_size) == ("python", None, None, None)
        assert launch.settle({"devices": 4, "num_nodes": 1}) == ({}, [])


@pytest.mark.parametrize(
    ("environment", "kind", "rank", "nodes", "processes"),
    [(TORCHRUN, "torchrun", 5, 2, 4), (SRUN, "srun", 3, 2, 2), ({**SRUN, "SLURM_JOB_NAME": "bash"}, "srun", 3, 2, 2)],
)
def test_launchers_are_read(environment, kind, rank, nodes, processes):
    launch = detect(environment)
    assert (launch.kind, launch.rank, launch.nodes, launch.processes) == (kind, rank, nodes, processes)
    assert launch.world_size == nodes * processes


JOB = {"SLURM_JOB_ID": "8", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}
TASK = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({**SRUN, **TASK}, "7_2"),
        ({**JOB, "SLURM_STEP_ID": "0"}, "8"),
        ({**JOB, **TASK, "SLURM_STEP_ID": "0"}, "7_2"),
        ({**JOB, "ENVIRONMENT": "BATCH"}, "8"),
        (JOB, None),  # typed into the shell that salloc opens
        ({**JOB, "SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "4"}, None),  # or srun --pty bash
        ({"ENVIRONMENT": "BATCH"}, None),
    ],
)
def test_what_slurm_starts_again_goes_on_with_its_run(environment, name):
    assert detect(environment).name == name


def test_workers_that_are_started_again_keep_their_run_when_the_clock_was_set(tmp_path, monkeypatch):
    """Without an id of the user's the run is called after the agent's start, which the kernel counts back from now."""
    attempts = [tmp_path / f"none_x/attempt_{number}/0" for number in (0, 1)]
    for folder in attempts:
        folder.mkdir(parents=True)
    first, restarted = (
        {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "RANK": "0", "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
        for folder in attempts
    )
    name, began = detect(first).name, process_started(os.getppid())
    monkeypatch.setattr(launcher, "process_started", lambda pid: began + 3600)
    assert name == f"{datetime.fromtimestamp(began):%Y%m%d-%H%M%S}"
    assert detect(restarted).name == name


def test_the_launcher_has_its_way_and_says_so():
    settled, lines = detect(TORCHRUN).settle({"devices": 3, "num_nodes": 4})
    assert settled == {"num_nodes": 2, "devices": 4}
    assert lines == [
        "trainer.num_nodes=2, from torchrun, instead of the configuration's 4",
        "trainer.devices=4, from torchrun, instead of the configuration's 3",
    ]
    assert detect(TORCHRUN).settle({"devices": "auto", "num_nodes": 1})[1] == []  # nothing that was asked for is changed


@pytest.mark.parametrize(
    ("environment", "hint"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "7"}, "--nproc-per-node"),
        (
            {**SRUN, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"},
            "\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n",
        ),
        # sbatch --nodes=2 --ntasks=4 --gres=gpu:2
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_GPUS_ON_NODE": "2"},
            "\n#SBATCH --ntasks-per-node=2\n#SBATCH --gpus-per-node=2\n",
        ),
        # srun -n 1 in a job of two nodes: Slurm warns, and takes one of them
        (
            {
                **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "1"},
                **{"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS_PER_NODE": "1"},
            },
            "on 1 of the 2 nodes .*\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n",
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, "without srun"),
        (
            {
                **{**SRUN, "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1"},
                "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
            },
            r"job 7 is a heterogeneous job of 2 components \(n1; n\[2-3\]\)",
        ),
        ({"NODE_RANK": "first"}, "NODE_RANK must be a number"),
        ({"MASTER_PORT": "first"}, "MASTER_PORT must be a number"),
    ],
)
def test_what_cannot_work_is_refused(environment, hint):
    with pytest.raises(ValueError, match=hint):
        detect(environment)


def test_nodes_by_hand_need_a_rank_and_a_master(monkeypatch):
    monkeypatch.delenv("NODE_RANK", raising=False)
    with pytest.raises(ValueError, match="NODE_RANK"):
        detect({}).settle({"num_nodes": 2})
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert detect({}).settle({"num_nodes": 2}) == ({}, [])


@pytest.mark.parametrize(
    ("environment", "trainer", "lines"),
    [
        ({}, {"devices": 4}, "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4"),
        ({}, {"devices": "4"}, "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4"),
        ({"SLURM_GPUS_ON_NODE": "8"}, {}, "--ntasks-per-node=8\n#SBATCH --gpus-per-node=8"),
        ({"SLURM_GPUS_ON_NODE": "1"}, {}, "--ntasks-per-node=1\n#SBATCH --gpus-per-node=1"),
        # --gpus-per-task=1
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0"}, {}, "--ntasks-per-node=2\n#SBATCH --gpus-per-node=2"),
    ],
)
def test_tasks_gpus_and_devices_that_do_not_fit_are_refused_with_the_lines_that_do(monkeypatch, environment, trainer, lines):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=lines):
        detect(SRUN).settle({"devices": "auto", **trainer})


@pytest.mark.parametrize(
    ("environment", "trainer"),
    [
        ({}, {"devices": 2}),
        ({}, {"devices": -1}),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, {"devices": "auto"}),
        ({"SLURM_GPUS_ON_NODE": "8"}, {"accelerator": "cpu"}),
    ],
)
def test_tasks_gpus_and_devices_that_fit_are_not(monkeypatch, environment, trainer):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert detect(SRUN).settle(trainer) == ({"num_nodes": 2, "devices": 2}, [])


def test_a_master_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "no-such-node[1-2]")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match=r"no-such-node1, does not resolve here.*HINT: export MASTER_ADDR"):
        detect(SRUN).environment().main_address  # noqa: B018
