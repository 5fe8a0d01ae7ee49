"""What the small process beside a rank says of how the rank ended."""

import os
from pathlib import Path

from project.cluster import oom


def test_a_process_that_is_about_to_end_is_in_no_cgroup_and_its_own_still_counts(tmp_path, monkeypatch):
    own, root = tmp_path / "own", tmp_path / "root"
    own.write_text("oom_kill 0")
    root.write_text("oom_kill 0")
    place = [(own, "cgroup")]
    monkeypatch.setattr(oom, "_oom_counter", lambda pid: place[0])
    memory = oom.OomKills(os.getpid())
    place[0] = (root, "cgroup")
    memory.follow_cgroup()  # it dies, and can't be seen to be dead yet
    monkeypatch.setattr(oom, "is_ending", lambda _: True)
    own.write_text("oom_kill 1")
    assert str(memory) == ", and its cgroup reports an OOM kill"


def test_a_process_whose_memory_takes_seconds_to_be_freed_is_in_no_cgroup_and_its_own_still_counts(tmp_path, monkeypatch):
    own, root = tmp_path / "own", tmp_path / "root"
    own.write_text("oom_kill 0")
    root.write_text("oom_kill 0")
    place = [(own, "cgroup")]
    monkeypatch.setattr(oom, "_oom_counter", lambda pid: place[0])
    memory = oom.OomKills(os.getpid())
    place[0] = (root, "cgroup")
    read_text = Path.read_text

    def exiting(path: Path) -> str:
        """As the kernel has it of a process that ends: its flags say so, and its state does not yet."""
        before, _, fields = read_text(path).rpartition(")")
        state, *others = fields.split()
        others[5] = str(int(others[5]) | 4)
        return f"{before}) {state} {' '.join(others)}"

    monkeypatch.setattr(Path, "read_text", lambda path: exiting(path) if path.name == "stat" else read_text(path))
    memory.follow_cgroup()
    memory.follow_cgroup()
    own.write_text("oom_kill 1")
    assert str(memory) == ", and its cgroup reports an OOM kill"


def test_a_process_that_was_put_into_another_cgroup_is_followed(tmp_path, monkeypatch):
    place = [(tmp_path / "first", "cgroup")]
    monkeypatch.setattr(oom, "_oom_counter", lambda pid: place[0])
    memory = oom.OomKills(os.getpid())
    (tmp_path / "second").write_text("oom_kill 1")
    place[0] = (tmp_path / "second", "cgroup")
    assert str(memory) == ", and its cgroup reports an OOM kill"
