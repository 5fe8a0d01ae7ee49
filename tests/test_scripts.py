"""The scripts: launch.sh checks what it is given; a wheel brings the configs along."""

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from project.cluster.oom import OomKills
from project.launch.children import Rank
from project.launch.torchrun_agent import exit_code
from tests.conftest import PATIENCE, ROOT, TINY, environment

LAUNCH = str(ROOT / "scripts" / "launch.sh")
LONG = ("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_epochs=100000", "--data.global_batch_size=48")


def launching(folder: Path, *command: str, **extra: str) -> subprocess.Popen[str]:
    """Starts a command; what it prints can be read while it runs."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment(PROJECT_PYTHON=sys.executable, **extra), cwd=folder, text=True, **pipes)


def launch(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "launch.sh"), *words],
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize(
    ("extra", "cause"),
    [
        ({"NNODES": "two"}, "NNODES must be a number"),
        ({"NNODES": "2"}, "NODE_RANK is not set"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "the last of NNODES=2 nodes is 1"),
        ({"MASTER_PORT": "70000"}, "is no port"),
        ({"NNODES": "1:"}, "must be a number or MIN:MAX"),
        ({"NNODES": "3:1"}, "greater than the other"),
        ({"NNODES": "1:3"}, "MASTER_ADDR is not set"),
        ({"NNODES": "1:3", "MASTER_ADDR": "a"}, "RUN_ID is not set"),
        ({"NNODES": "1:3", "MASTER_ADDR": "a", "RUN_ID": "a b"}, "RUN_ID is made of letters"),
        (
            {
                "NNODES": "2",
                "NODE_RANK": "1",
                "MASTER_ADDR": "no-such-host",
                "PROJECT_PYTHON": sys.executable,
                "NPROC_PER_NODE": "1",
            },
            "does not know the host no-such-host",
        ),
        ({}, "what to run?"),
    ],
)
def test_launch_checks_its_environment(extra, cause):
    done = launch(*(["fit"] if extra else []), **extra)
    assert done.returncode == 2
    assert cause in done.stderr


_PYTHON = """#!/bin/sh
case "$*" in
  *interfaces*) echo 10.0.0.9 0 ;;
  *agent*) echo "agent $*"; env | grep ^PET_ ;;
  *device_count*) echo 8 ;;
  -c*) echo 3 ;;
esac
"""


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "--nnodes 1 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0"),
        ({"PET_NPROC_PER_NODE": "auto"}, "--nproc-per-node 8"),
        ({"PET_NPROC_PER_NODE": "gpu"}, "--nproc-per-node 8"),
        ({"PET_NPROC_PER_NODE": "cpu"}, "--nproc-per-node 3"),
        (
            {
                "PET_NNODES": "2",
                "PET_NPROC_PER_NODE": "4",
                "PET_NODE_RANK": "1",
                "PET_MASTER_ADDR": "a",
                "PET_MASTER_PORT": "1",
            },
            "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint a:1",
        ),
        (
            {
                "PET_NNODES": "2",
                "PET_MASTER_ADDR": "a",
                "NNODES": "1:3",
                "MASTER_ADDR": "b",
                "RUN_ID": "c",
                "PET_NODE_RANK": "0",
            },
            "--nnodes 1:3 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint b:29500",
        ),
    ],
)
def test_launch_takes_what_kubeflow_says_where_nothing_else_does(tmp_path, extra, words):
    """A Python that only tells what it is asked to do."""
    python = tmp_path / "python"
    python.write_text(_PYTHON)
    python.chmod(0o755)
    done = launch("fit", PROJECT_PYTHON=str(python), **extra)
    assert words in done.stdout, done
    assert "PET_" not in done.stdout  # torchrun would take them, too


@pytest.mark.slow
def test_launch_ends_with_the_code_of_its_worker_and_does_not_repeat_what_is_wrong(tmp_path):
    """Two restarts are allowed, and none is spent on a wrong key."""
    port = str(find_free_network_port())
    setting = {"PROJECT_PYTHON": sys.executable, "NPROC_PER_NODE": "2", "MASTER_PORT": port, "MAX_RESTARTS": "2"}
    done = launch("fit", "--config=configs/ddp.yaml", "--trainer.max_epoch=1", **setting)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("Did you mean trainer.max_epochs?") == 1
    assert "Traceback" not in done.stderr


def test_the_exit_code_is_that_of_the_worker_that_failed_first():
    def failed(timestamp: int, code: int) -> SimpleNamespace:
        return SimpleNamespace(timestamp=timestamp, exitcode=code)

    assert exit_code({0: failed(7, 1), 1: failed(6, 75)}) == 75
    assert exit_code({0: failed(7, 75), 1: failed(7, 1)}) == 1  # who lost another was not the first
    assert exit_code({3: failed(7, -9)}) == 137
    assert exit_code({3: failed(7, -6), 1: failed(8, 75)}) == 75  # NCCL ended it: another time, or elsewhere, it may work
    assert exit_code({0: failed(7, -6), 1: failed(7, 2)}) == 2  # for what rank 1 did
    assert exit_code({0: failed(7, 143)}) == 143


def test_a_supervisor_does_not_blame_the_host_of_a_rank_that_nccl_ended():
    """It may only have noticed what another rank does, as one that ends with 75."""
    aborted = Rank(1, os.getpid(), OomKills(os.getpid()), int(signal.SIGABRT))
    assert (aborted.code, aborted.killed_by) == (75, 0)
    assert aborted.describe_loss("h1") == "rank 1 on h1 was ended by SIGABRT: NCCL or another library gave up."
    ended = Rank(0, os.getpid(), OomKills(os.getpid()), 75 << 8)
    assert ended.describe_loss("h1") == "rank 0 on h1 can't go on (exit code 75): see its last message."
    assert ended.describe_loss("h1", "rank 0 on h1 has made no progress.") == "rank 0 on h1 has made no progress."
    killed = Rank(1, os.getpid(), OomKills(os.getpid()), int(signal.SIGKILL))
    assert (killed.code, killed.killed_by) == (137, 9)


def batch(tmp_path, code: int, *words: str, **extra: str) -> list[str]:
    """What slurm.sbatch starts, where srun ends with this code: the commands, by line."""
    for name, ends in (("srun", code), ("scontrol", 0)):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "{name} $*${{PROJECT_IMAGE:+ in $PROJECT_IMAGE}}"\nexit {ends}\n')
        program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "slurm.sbatch"), *words, "--run=it"],
        cwd=tmp_path,
        env=environment(PATH=path, SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(tmp_path), **extra),
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("container", "command"),
    [
        ("", "python -m project fit --run=it"),
        (
            "images/my.sif",
            "apptainer exec --nv --bind {0} --pwd {0} images/my.sif python -m project fit --run=it in my.sif@sha256:{1}",
        ),
        (
            "docker://team/image@sha256:12",
            "apptainer exec --nv --bind {0} --pwd {0} docker://team/image@sha256:12 python -m project fit --run=it "
            "in docker://team/image@sha256:12",
        ),
        (
            "team/image:1",
            "--container-image=team/image:1 --container-mounts={0}:{0} --container-workdir={0} python -m project fit --run=it "
            "in team/image:1",
        ),
    ],
)
def test_a_batch_job_may_run_in_a_container(tmp_path, container, command):
    """By an option or by the environment; the run is told its image."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images/my.sif").write_bytes(b"image")
    expected = [f"srun --kill-on-bad-exit=1 {command.format(tmp_path, hashlib.sha256(b'image').hexdigest())}"]
    assert batch(tmp_path, 0, CONTAINER=container, PROJECT_PYTHON="python") == expected
    if container:
        assert batch(tmp_path, 0, "--container", container) == expected
        assert batch(tmp_path, 0, f"--container={container}", CONTAINER="another.sif") == expected
        (line,) = batch(tmp_path, 0, "--container", container, PROJECT_IMAGE="told@sha256:34")
        assert line.endswith(" in told@sha256:34")


def test_a_container_that_is_not_there_or_comes_too_late_ends_the_job(tmp_path):
    assert batch(tmp_path, 2, "--container", "no.sif") == []
    assert batch(tmp_path, 2, "--config", "mine.yaml", "--container", "no.sif") == []


def test_a_batch_job_that_sigusr1_ended_is_put_back(tmp_path):
    assert batch(tmp_path, 138, PROJECT_PYTHON="python")[1:] == ["scontrol requeue 7"]
    array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2"}
    assert batch(tmp_path, 138, PROJECT_PYTHON="python", **array)[1:] == ["scontrol requeue 6_2"]
    assert len(batch(tmp_path, 1, PROJECT_PYTHON="python")) == 1


@pytest.mark.skipif(not os.access(ROOT / ".venv/installed-test", os.R_OK), reason="not run from scripts/test")
@pytest.mark.parametrize(
    ("words", "cause"),
    [
        pytest.param(("--trainer.max_epochs", "x"), "trainer.max_epochs: Expected an int", marks=pytest.mark.slow),
        pytest.param(("--data.batch_size", "48"), "can't make a global batch of 128", marks=pytest.mark.slow),
    ],
)
def test_launch_runs_torchrun_and_shows_what_it_took(tmp_path, words, cause):
    """What can't work ends the run: no worker is started again."""
    done = subprocess.run(
        [str(ROOT / "scripts" / "launch.sh"), "fit", "--config", "configs/ddp.yaml", *words],
        env=environment(NPROC_PER_NODE="2"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "processes a node   2" in done.stdout
    assert "OMP_NUM_THREADS" not in done.stderr
    assert 1 <= done.stderr.count(cause) <= 2  # a rank may be slow to end, and the other reports the same
    assert done.returncode == 2


@pytest.mark.slow
def test_a_signal_to_launch_sh_stops_the_run_but_not_sighup_under_nohup(tmp_path):
    settings = {"NPROC_PER_NODE": "3", "MASTER_PORT": str(find_free_network_port())}
    with launching(tmp_path, "nohup", LAUNCH, *LONG, "--run=it", **settings) as run:
        assert run.stdout is not None
        seen = ""
        for line in run.stdout:
            seen += line
            if "epoch 1" in line:
                run.send_signal(signal.SIGHUP)
            elif "epoch 2" in line:  # it did not mind
                run.send_signal(signal.SIGTERM)
    assert run.returncode == 143, seen
    assert seen.count("Stopped by SIGTERM after step") == 1
    assert "Traceback" not in seen


def rank_of(agent, rank):
    """Returns the process of a rank, by its agent."""
    workers = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    marks = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in workers}
    return next(int(pid) for pid, mark in marks.items() if f"LOCAL_RANK={rank}".encode() in mark)


@pytest.mark.faults
def test_two_agents_on_one_host_meet_over_loopback(tmp_path):
    common = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port()), "NPROC_PER_NODE": "1"}
    words = (
        LAUNCH,
        "fit",
        "--config=configs/ddp.yaml",
        *TINY,
        "--trainer.max_steps=2",
        "--data.global_batch_size=32",
        "--run=it",
    )
    agents = [launching(tmp_path, *words, **common, NODE_RANK=str(rank)) for rank in range(2)]
    outputs = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert ", rank 1 is " in outputs[0], outputs


def test_a_port_in_use_on_one_node_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = launch("fit", "--config=configs/ddp.yaml", MASTER_PORT=port, NPROC_PER_NODE="2", PROJECT_PYTHON=sys.executable)
    assert done.returncode == 1
    assert f"launch.sh: Port {port} on " in done.stderr
    assert "is in use by another program" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kills"), [(2, 2), pytest.param(2, 10, marks=pytest.mark.faults), pytest.param(3, 10, marks=pytest.mark.faults)]
)
def test_one_node_recovers_from_each_lost_rank(tmp_path, ranks, kills):
    """Each attempt goes on where the last one was killed."""
    flags = (
        "--checkpoints.every_n_steps=1",
        "--trainer.log_every_n_steps=1",
        "--run=it",
        f"--data.global_batch_size={16 * ranks}",
    )
    with launching(tmp_path, LAUNCH, *LONG, *flags, NPROC_PER_NODE=str(ranks), MAX_RESTARTS=str(kills)) as run:
        assert run.stdout is not None
        seen, killed, steps = "", 0, [0]
        for line in run.stdout:
            seen += line
            step = re.search(r"INFO +epoch .* step (\d+)[/ ]", line)  # of a validation, too, which doesn't take ten seconds
            if step is None or int(step[1]) < steps[-1] + 2:
                continue
            if killed == kills:
                run.send_signal(signal.SIGTERM)
                break
            os.kill(rank_of(run.pid, killed % ranks), signal.SIGKILL)
            steps.append(int(step[1]))
            killed += 1
        seen += run.stdout.read()
    assert run.returncode == 143, seen
    assert killed == kills, seen
    assert seen.count("Resumes from") == kills, seen


def test_the_hooks_of_a_commit_are_what_the_tests_begin_with():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert all(hook["language"] == "system" for hook in local["hooks"])
    script = (ROOT / "scripts/test").read_text()
    begins = re.findall(r'^"\$python" (-m (?:ruff|mypy).*)$', script, re.MULTILINE)
    assert [hook["entry"] for hook in local["hooks"]] == [f".venv/bin/python {command}" for command in begins]


@pytest.mark.slow
def test_a_wheel_has_the_configs(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"project/configs/ddp.yaml", "project/configs/project.schema.json", "project/py.typed"} <= {*names}
    (entry,) = [name for name in names if re.fullmatch(r"samerun-[\d.]+\.dist-info/entry_points\.txt", name)]
    assert "samerun = project.__main__:console" in zipfile.ZipFile(wheel).read(entry).decode()
    assert "project/cli/main.py" in names
    assert {f"project/watch/pages/{name}" for name in ("run.html", "page.js", "uplot.js", "uplot.license")} < {*names}
    assert not any(name.startswith(("tests", "lightning_logs")) for name in names)

    # Unpacked somewhere else, it finds its configs, and says where the benchmark is.
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")

    def program(*words: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "project", *words)
        site = environment(PYTHONPATH=str(tmp_path / "site"))
        return subprocess.run(command, cwd=tmp_path, env=site, capture_output=True, text=True)

    done = program("fit", "--config", "configs/vit.yaml", "--print_config")
    assert "VisionTransformer" in done.stdout, done.stderr
    done = program("bench", "--config", "configs/bench.yaml")
    assert (done.returncode, done.stderr[:29]) == (2, "bench belongs to a checkout o"), done.stderr
