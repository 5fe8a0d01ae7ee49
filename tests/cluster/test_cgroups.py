"""The limits of a cgroup, as they are seen on a host and in containers of every kind, and the cores that a process has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from project.cluster import cgroups, cores
from tests.cluster.machine import missing
from tests.conftest import environment

POD = "/kubepods/pod1/c1"


class Machine:
    """Files as /proc and /sys have them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.proc = folder, folder / "proc"
        self.proc.mkdir()

    def process(self, group: str, *mounts: str) -> None:
        (self.proc / "cgroup").write_text(group)
        lines = ["22 1 0:21 / /proc rw,nosuid shared:5 - proc proc rw", *(mount.format(self.folder) for mount in mounts)]
        (self.proc / "mountinfo").write_text("\n".join(lines) + "\n")

    def write(self, place: str, **files: object) -> None:
        folder = self.folder / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


V2 = "31 23 0:28 {root} {{}}/cg rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 23 0:28 {root} {{}}/cg/{name} rw,nosuid - cgroup cgroup rw,{kinds}"

VERSION_2 = {
    "on a host": (f"0::{POD}\n", V2.format(root="/"), f"cg{POD}"),
    "with a namespace of cgroups": ("0::/\n", V2.format(root="/"), "cg"),
    "without one, where only its own part is mounted": (f"0::{POD}\n", V2.format(root=POD), "cg"),
    "whose path is outside of what is mounted": ("0::/../../elsewhere\n", V2.format(root="/"), "cg"),
}


@pytest.mark.parametrize("case", VERSION_2)
def test_limits_of_version_2(machine, case):
    group, mount, place = VERSION_2[case]
    machine.process(group, mount)
    machine.write(place)
    assert cgroups.quota(machine.proc) is None
    assert cgroups.memory_left(machine.proc) is None
    machine.write(place, cpu__max="150000 100000", memory__max=8 << 30, memory__current=3 << 30)
    assert cgroups.quota(machine.proc) == 1.5
    assert cgroups.memory_left(machine.proc) == 5 << 30
    machine.write(place, memory__stat=f"anon 5\ninactive_file {1 << 30}\nactive_file 7")
    assert cgroups.memory_left(machine.proc) == 6 << 30
    machine.write(place, cpu__max="max 100000", memory__max="max")
    assert cgroups.quota(machine.proc) is None
    assert cgroups.memory_left(machine.proc) is None


VERSION_1 = {
    "on a host": ("/docker/c1", "/", "/docker/c1"),
    "where only its own part is mounted": ("/docker/c1", "/docker/c1", ""),
    "a group within that": ("/docker/c1/mine", "/docker/c1", "/mine"),
    "with a namespace of cgroups": ("/", "/", ""),
}


@pytest.mark.parametrize("case", VERSION_1)
def test_limits_of_version_1(machine, case):
    group, root, place = VERSION_1[case]
    machine.process(
        f"5:memory:{group}\n4:cpuset:/\n3:cpu,cpuacct:{group}\n1:name=systemd:/\n",
        V1.format(root=root, name="cpu,cpuacct", kinds="cpu,cpuacct"), V1.format(root=root, name="memory", kinds="memory"),
    )  # fmt: skip
    machine.write(f"cg/cpu,cpuacct{place}", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    machine.write(f"cg/memory{place}", memory__limit_in_bytes=0x7FFFFFFFFFFFF000, memory__usage_in_bytes=1 << 30)
    assert cgroups.quota(machine.proc) is None
    assert cgroups.memory_left(machine.proc) is None
    machine.write(f"cg/cpu,cpuacct{place}", cpu__cfs_quota_us=400000)
    machine.write(f"cg/memory{place}", memory__limit_in_bytes=2 << 30, memory__stat=f"total_inactive_file {1 << 20}")
    assert cgroups.quota(machine.proc) == 4
    assert cgroups.memory_left(machine.proc) == (1 << 30) + (1 << 20)


def test_the_tightest_limit_counts_and_both_versions_side_by_side(machine):
    """As systemd's hybrid mode has it, with the limit of a pod above that of its container."""
    v2 = "41 31 0:38 / {}/cg/unified rw - cgroup2 cgroup2 rw"
    machine.process(f"1:cpu:{POD}\n0::/\n", V1.format(root="/", name="cpu", kinds="cpu"), v2)
    machine.write("cg/cpu/kubepods/pod1", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    machine.write(f"cg/cpu{POD}", cpu__cfs_quota_us=600000, cpu__cfs_period_us=100000)
    machine.write("cg/unified", cgroup__procs="")
    assert cgroups.quota(machine.proc) == 2.5


def test_nothing_is_mounted_or_there_is_no_proc(machine):
    machine.process("0::/\n")
    assert cgroups.quota(machine.proc) is None
    assert cgroups.folders("cpu", machine.folder / "nowhere") == []


def test_a_real_limit(tmp_path):
    """A cgroup with one and a half cores."""
    tops = [(folder, version) for folder, version in cgroups.folders("cpu") if os.access(folder / "cgroup.procs", os.W_OK)]
    group = tops[0][0] / f"project-test-{os.getpid()}" if tops else Path("/nowhere")
    try:
        group.mkdir()
    except OSError:
        missing("no cgroup can be made here")
    try:
        if not (group / "cpu.max").exists() and not (group / "cpu.cfs_quota_us").exists():
            missing("this cgroup has no limits of CPU time")
        if tops[0][1] == 2:
            (group / "cpu.max").write_text("150000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text("150000")
        program = "import sys; from project.cluster import cores; cores.os.sched_getaffinity = lambda pid: set(range(64))\n"
        program += "from project.cluster.cgroups import quota; print(quota(), cores.cores(), cores.cores(3))"
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        words = ["sh", "-c", enter, "sh", sys.executable, "-c", program]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
        assert done.stdout == "1.5 1 1\n"
    finally:
        group.rmdir()


@pytest.mark.parametrize(
    ("tasks", "quota", "expected"),
    [(None, None, {1: 16, 4: 4, 100: 1}), ("6", None, {1: 6, 4: 4}), ("6", 2.5, {1: 2, 2: 1})],
)
def test_processes_share_what_affinity_slurm_and_cgroups_allow(monkeypatch, tasks, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(cores, "quota", lambda: quota)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    if tasks:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", tasks)
    assert {processes: cores.cores(processes) for processes in expected} == expected
