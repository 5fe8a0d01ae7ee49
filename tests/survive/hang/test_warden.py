"""What the small process beside a rank says of how the rank ended."""

import os

from project.survive.hang import warden


def test_a_process_that_is_about_to_end_is_in_no_cgroup_and_its_own_still_counts(tmp_path, monkeypatch):
    own, root = tmp_path / "own", tmp_path / "root"
    own.write_text("oom_kill 0")
    root.write_text("oom_kill 0")
    place = [(own, "cgroup")]
    monkeypatch.setattr(warden, "_oom_counter", lambda pid: place[0])
    memory = warden.Memory(os.getpid())
    place[0] = (root, "cgroup")
    memory.follow()  # it dies, and can't be seen to be dead yet
    monkeypatch.setattr(warden, "ended", lambda *_: (True, 9))
    own.write_text("oom_kill 1")
    assert str(memory) == ", and its cgroup reports an OOM kill"


def test_a_process_that_was_put_into_another_cgroup_is_followed(tmp_path, monkeypatch):
    place = [(tmp_path / "first", "cgroup")]
    monkeypatch.setattr(warden, "_oom_counter", lambda pid: place[0])
    memory = warden.Memory(os.getpid())
    (tmp_path / "second").write_text("oom_kill 1")
    place[0] = (tmp_path / "second", "cgroup")
    assert str(memory) == ", and its cgroup reports an OOM kill"
