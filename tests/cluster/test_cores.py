"""The cores that a process really has."""

import os

import pytest

from project.cluster import cores


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(cores, "quota", lambda: None)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)


def test_processes_share_what_the_affinity_allows(allowed):
    assert cores.cores() == 16
    assert cores.cores(4) == 4
    assert cores.cores(100) == 1


def test_slurm_and_cgroups_may_allow_less(allowed, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    assert cores.cores() == 6
    monkeypatch.setattr(cores, "quota", lambda: 2.5)
    assert cores.cores() == 2
    assert cores.cores(2) == 1
