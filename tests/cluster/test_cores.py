"""The cores that a process really has."""

import os
from pathlib import Path

import pytest

from project.cluster import cores


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(cores, "_cgroup_quota", lambda: None)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)


def test_processes_share_what_the_affinity_allows(allowed):
    assert cores.cores() == 16
    assert cores.cores(4) == 4
    assert cores.cores(100) == 1


def test_slurm_and_cgroups_may_allow_less(allowed, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    assert cores.cores() == 6
    monkeypatch.setattr(cores, "_cgroup_quota", lambda: 2.5)
    assert cores.cores() == 2
    assert cores.cores(2) == 1


def test_quotas_of_both_cgroup_versions(tmp_path: Path):
    assert cores._quota_v2(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cores._quota_v2(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores._quota_v2(tmp_path) is None
    (tmp_path / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert cores._quota_v1(tmp_path) is None
    (tmp_path / "cpu.cfs_quota_us").write_text("400000\n")
    assert cores._quota_v1(tmp_path) == 4
