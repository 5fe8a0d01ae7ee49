"""The image, built from the Dockerfile, and what is trained in it, by any user, on a read-only root.

The libraries are not downloaded: pip finds those of the tests.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.containers import PACKAGES, Container, Image
from tests.cluster.machine import LONG, wait_until
from tests.cluster.training import FIT
from tests.conftest import ROOT, TINY, environment, took

pytestmark = pytest.mark.slow

CONTEXT = ("Dockerfile", ".dockerignore", "pyproject.toml", "project", "configs", "scripts")
TRAINED = ("--config", "configs/ddp.yaml", *TINY, "--run=it")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an image is built from, and what must not come into it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in CONTEXT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for secret in (".git/config", ".env", "lightning_logs/old/config.yaml", "datasets/large", "project/__pycache__/old.pyc"):
        (folder / secret).parent.mkdir(parents=True, exist_ok=True)
        (folder / secret).write_text("secret")
    return folder


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    made = Image(tmp_path_factory.mktemp("image"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def built(image: Image, checkout: Path) -> str:
    began = time.monotonic()
    image_id = image.build(checkout, "abc1234")
    took("an image is built, without its libraries", time.monotonic() - began)
    return image_id


@pytest.fixture(scope="module")
def files(image: Image, built: str) -> tuple[Path, dict[str, Any]]:
    """The image's; hosts that are started later see them, too."""
    return image.files(built)


@pytest.fixture
def container(image: Image, files: tuple[Path, dict[str, Any]], tmp_path: Path) -> Container:
    """One core, 64 MB of /dev/shm."""
    return Container(*files, image.packages, tmp_path)


def test_a_change_of_code_makes_a_small_layer(image, built, checkout):
    (checkout / "project/errors.py").write_text((checkout / "project/errors.py").read_text() + "# changed\n")
    began = time.monotonic()
    changed = image.build(checkout, "def5678")
    took("after a change of code the image is built again", time.monotonic() - began)
    before, after = image.layers(built), image.layers(changed)
    new = [layer for layer in after if layer not in before]
    size = sum(bytes_ for _, bytes_ in new)
    print(f"\nlayers of a change of code: {len(new)} of {len(after)}, {size / 1e6:.2f} MB, not compressed")
    assert 0 < size < 5e6
    assert len(new) == 2  # the code and what is compiled of it, and not the libraries below
    root, config = image.files(changed)
    assert (root / "app/COMMIT").read_text().startswith("def5678 ")
    assert sorted(path.name for path in (root / "app").iterdir()) == [
        *("COMMIT", "configs", "lightning_logs", "project", "pyproject.toml", "scripts"),
    ]
    assert not list((root / "app/lightning_logs").iterdir())
    assert not (root / "app/project/__pycache__/old.pyc").exists()
    assert config["User"] == "1000"
    assert not config.get("ExposedPorts")


def test_the_doctor_and_two_steps_by_another_user_on_a_read_only_root(container):
    """A user that nobody has named, without a home."""
    container.user, container.group = 4711, 4711
    container.env = {"PROJECT_NODE": "node-7", "PROJECT_IMAGE": "project@sha256:a"}
    bare = ("env", "-u", "USER", "-u", "LOGNAME", "-u", "HOME")
    doctor = container.run(*bare, "scripts/launch.sh", "doctor", *TRAINED, "--fast=true")
    assert doctor.code == 0, doctor.output
    assert "4f1c9a7b2d3e on node-7" in doctor.output
    logs = container.folder / "lightning_logs/it"
    findings = {finding["check"]: finding for finding in json.loads((logs / "doctor.json").read_text())["findings"]}
    assert findings["versions"]["text"].endswith("commit abc1234, image project@sha256:a"), doctor.output
    assert findings["hardware"]["text"].endswith(" 1 core(s)")
    assert findings["limits"]["figures"]["limits"][0]["/dev/shm"] <= 64 << 20
    run = container.run(*bare, "python", "-m", "project", "fit", *TRAINED, "--trainer.max_steps=2")
    assert run.code == 0, run.output
    (start,) = [entry for entry in map(json.loads, (logs / "life.jsonl").open()) if entry["event"] == "start"]
    assert start["hosts"] == {"4f1c9a7b2d3e (on node-7)": 1}
    assert (start["commit"], start["image"]) == ("abc1234", "project@sha256:a")
    assert "WARNING" not in run.output


def test_runs_that_cannot_be_written_are_one_message(container):
    container.writable = False
    run = container.run("python", "-m", "project", "fit", *TRAINED)
    assert run.code == 1
    (line,) = run.output.splitlines()
    assert "The run's folder /app/lightning_logs/it can't be made" in line
    assert "HINT: mount a folder there that user 1000 can write" in line


def test_a_container_is_told_to_stop_and_its_successor_goes_on(container):
    """Two ranks under torchrun's agent, which is PID 1; the other container has another name, on the same node."""
    words = ("scripts/launch.sh", "fit", *TRAINED, "--trainer.max_epochs=30000", "--checkpoints.every_n_steps=1000")
    container.env = {"NPROC_PER_NODE": "2", "PROJECT_NODE": "node-7"}
    started = container.start(*words)
    wait_until(lambda: "step 10" in started.text() or started.process.poll() is not None, LONG, started.text)
    started.signal("TERM")
    run = started.wait(LONG)
    assert run.code == 143, run.output
    assert "Stopped by SIGTERM after step" in run.output
    container.hostname = "another"
    after = int(run.output.partition("Stopped by SIGTERM after step ")[2].partition(".")[0])
    successor = container.run(*words, f"--trainer.max_steps={after + 2}")
    assert successor.code == 0, successor.output
    assert "Resumes from" in successor.output
    assert "Traceback" not in run.output + successor.output


APPTAINER = r"""#!/bin/sh
# What `apptainer exec` does of what the script asks it for: these words, in the image's files, with this folder and /tmp.
echo "$*" >> "{calls}"
[ "$1 $2 $3 $5 $4" = "exec --nv --bind --pwd $6" ] || exit 97
place=$4; shift 7
exec unshare --mount sh -c '
  place=$1; shift
  mkdir -p "{root}{packages}" "{root}/tmp"
  for folder in /proc /sys /dev /tmp; do mount --rbind $folder "{root}$folder"; done
  mount --bind "{libraries}" "{root}{packages}"
  exec chroot "{root}" sh -c "cd \"$place\" && exec \"\$@\"" sh "$@"' sh "$place" "$@"
"""


@pytest.mark.faults
def test_a_slurm_job_in_a_container_goes_back_into_the_queue_and_on(files, slurm, image, checkout, tmp_path):
    """With a stand-in for Apptainer. In its container there is no scontrol, and no Python of this machine's."""
    calls, sif = tmp_path / "calls", tmp_path / "project.sif"
    sif.write_bytes(b"an image")
    stand_in = tmp_path / "bin/apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text(APPTAINER.format(calls=calls, root=files[0], packages=PACKAGES, libraries=image.packages))
    stand_in.chmod(0o755)
    place = tmp_path / "checkout"
    for name in ("project", "configs", "scripts"):
        shutil.copytree(checkout / name, place / name)
    settings = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="eth0", PYTHONPATH="")
    words = ("scripts/slurm.sbatch", "--container", str(sif), *FIT[1:], "--trainer.max_epochs=400")
    search_path = f"PATH={stand_in.parent}:{os.environ['PATH']}:/usr/local/bin"
    job = slurm.run("env", search_path, "sbatch", "--parsable", *words, cwd=place, env=settings).split()[-1]
    log = place / f"slurm-{job}.log"

    why = partial(slurm.why, job, log)

    def starts() -> list[dict[str, object]]:
        files = list((place / "lightning_logs").glob("*/life.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [entry for entry in lines if entry["event"] == "start"]

    def trains(number: int) -> bool:
        assert slurm.job(job)["JobState"] not in ("FAILED", "COMPLETED"), why()
        return len(starts()) == number

    wait_until(lambda: trains(1), LONG, why)
    slurm.run("scancel", "--signal=USR1", job)
    wait_until(lambda: trains(2), LONG, why)
    assert slurm.job(job)["Restarts"] == "1", why()
    slurm.run("scancel", "--full", "--signal=TERM", job)
    wait_until(lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), LONG, why)
    digest = hashlib.sha256(b"an image").hexdigest()
    assert {entry["image"] for entry in starts()} == {f"project.sif@sha256:{digest}"}
    assert "another image" not in log.read_text()
    assert "Resumes from" in log.read_text(), why()
    expected = f"exec --nv --bind {place} --pwd {place} {sif} python -m project fit {FIT[1]}"
    assert calls.read_text().count(expected) == 4  # two nodes, twice
