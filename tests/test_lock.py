"""What is installed is what scripts/lock.txt lists, byte for byte."""

import re
import subprocess
import sys
from importlib.metadata import distributions

import pytest

from tests.conftest import ROOT

LOCK = ROOT / "scripts/lock.txt"
ENTRY = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[^\s;]+)(?: ; .*)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\\n)?)+")


def listed(extras: str) -> str:
    """Returns what is installed for these extras, as pip reads it."""
    words = (sys.executable, str(ROOT / "scripts/requirements.py"), extras)
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def entries(extras: str) -> dict[str, set[str]]:
    """Returns the versions by name: some have another on Python 3.10."""
    versions: dict[str, set[str]] = {}
    for entry in ENTRY.finditer(listed(extras)):
        versions.setdefault(re.sub("[-_.]+", "-", entry["name"]).lower(), set()).add(entry["version"])
    return versions


def test_all_that_is_installed_is_locked_by_hash():
    """Nothing else stands in the list: no address, no path, no package without its hashes; the part that builds is in it."""
    for extras in ("", "test", "test-all", "ray,export,gpu", "audit"):
        assert not ENTRY.sub("", listed(extras)).strip()
    assert {"torch", "lightning", "torchmetrics", "jsonargparse", "hatchling", "nvidia-nccl-cu13"} <= entries("").keys()
    assert "pytest" not in entries("")
    assert {"pytest", "ray", "kubernetes-validate", "wandb"} <= entries("test-all").keys()
    text = LOCK.read_text()
    assert not re.search(r"://|^-|^\s+# via [./]", text, re.MULTILINE)
    assert not ENTRY.fullmatch("torch==2.15.0\n")


def test_what_is_installed_here_is_what_is_locked():
    locked, known = entries("test"), entries("test-all")
    installed = {re.sub("[-_.]+", "-", item.name).lower(): item.version for item in distributions()}
    if not (ROOT / ".venv/installed-test").exists() and not (ROOT / ".venv/installed-test-all").exists():
        pytest.skip("not installed by scripts/setup")
    assert {name for name in installed.keys() & known.keys() if installed[name] not in known[name]} == set()
    assert {"torch", "lightning", "numpy", "pytest"} <= installed.keys() & locked.keys()


def test_an_extra_that_there_is_not_is_named():
    words = (sys.executable, str(ROOT / "scripts/requirements.py"), "none")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("There is no extra none. HINT: EXTRAS is some of digits,export,")


def test_a_file_with_another_hash_is_refused(tmp_path):
    """pip compares what it is about to install; here with a wheel of one file that lies beside the list."""
    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    (tmp_path / "list.txt").write_text(f"small==1.0 --hash=sha256:{'0' * 64}\n")
    pip = (sys.executable, "-m", "pip", "download", "--no-index", "--no-deps", f"--find-links={tmp_path}")
    words = (*pip, "--require-hashes", f"--dest={tmp_path / 'there'}", "-r", str(tmp_path / "list.txt"))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
    setup = (ROOT / "scripts/setup").read_text()
    assert "pip_install --require-hashes -r" in setup
    assert "--no-deps --no-build-isolation -e" in setup


@pytest.mark.parametrize("file", ["Dockerfile", "scripts/apptainer.def"])
def test_images_begin_with_a_base_of_one_digest_and_install_by_hash(file):
    text = (ROOT / file).read_text()
    assert re.search(r"BASE=python:3\.\d+-slim@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert "--require-hashes -r" in text
