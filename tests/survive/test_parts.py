"""Checkpoints in parts can be trusted as files can: cut off anywhere, damaged, incomplete, and read by any number of ranks."""

import json
import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from project.checkpoints.reading import SafeCheckpointIO, newest_good, read_manifest
from project.checkpoints.writing import clean_up
from project.checkpoints.writing import write as write_file
from project.errors import UserError
from tests.survive.parts_world import Strike, World, full_disk, read, whole, write
from tests.survive.test_checkpoints import cut, flip_a_bit
from tests.survive.test_resume import same

NAMES = {step: f"step-{step:09d}.ckpt" for step in (1, 2, 3)}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Two checkpoints of three ranks."""
    folder = tmp_path_factory.mktemp("three")
    world = World(folder, ranks=3)
    assert [result[:2] for result in world.run(write, [1, 2], None, 9)] == [[None, None]] * 3
    return folder


@pytest.fixture
def copied(three, tmp_path):
    shutil.copytree(three / "checkpoints", tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


# Cut off -------------------------------------------------------------------------------------------------------------


def assert_nothing_is_lost(folder: Path) -> int:
    """At the next start: the newest is whole, and nothing else is there but what is, too."""
    clean_up(folder)
    newest = newest_good(folder)
    assert newest is not None
    path, manifest = newest
    step = manifest["position"]["global_step"]
    assert same(SafeCheckpointIO().load_checkpoint(path), whole(step))
    for file in folder.iterdir():
        assert file.suffix in (".ckpt", ".json"), file
        read_manifest(file.with_suffix(".ckpt"))
    return step


def strikes(ranks: int, folder: Path) -> list[Strike]:
    """Every place between two moves of a write, on each rank."""
    moves = [result[-1] for result in World(folder, ranks).run(write, [1, 2], None, 1)]
    assert moves[0] > 9
    assert all(moves[1:])
    return [Strike(rank, move) for rank, count in enumerate(moves) for move in range(count)]


def struck(folder: Path, ranks: int, strike: Strike) -> int:
    world = World(folder, ranks)
    results = world.run(write, [1, 2], strike, 1)
    assert world.codes[strike.rank] == -signal.SIGKILL
    left = [rank for rank in range(ranks) if rank != strike.rank and not strike.all]
    assert [world.codes[rank] for rank in left] == [0] * len(left)  # and nobody waits for the dead
    assert all("does not answer" in results[rank][1] for rank in left if results[rank][1]), results
    return assert_nothing_is_lost(folder / "checkpoints")


@pytest.mark.parametrize(
    ("ranks", "all_of_them", "every"),
    [
        (2, False, 5),
        pytest.param(3, False, 1, marks=pytest.mark.faults),
        pytest.param(3, True, 1, marks=pytest.mark.faults),
    ],
)
def test_ranks_are_killed_at_any_place(tmp_path, ranks, all_of_them, every):
    places = [replace(strike, all=all_of_them) for strike in strikes(ranks, tmp_path / "count")[::every]]
    steps = {struck(tmp_path / f"{strike.rank}-{strike.move}", ranks, strike) for strike in places}
    assert steps == {1, 2}  # some fell before the checkpoint was there, and some when it was


def test_a_full_disk_of_one_rank_is_every_ranks_failure_and_tried_again(tmp_path):
    world = World(tmp_path, ranks=3)
    for first, second, third in world.run(full_disk, 1):
        assert first[0] is None
        assert second[0] == "rank 1 on host-1: [Errno 28] No space left on device"
        assert second[1] == [NAMES[1], "step-000000001.json"]  # nothing is left of it
        assert third[0] is None
    assert assert_nothing_is_lost(tmp_path / "checkpoints") == 3


# Damaged -------------------------------------------------------------------------------------------------------------


def of_another(path: Path) -> None:
    shutil.copyfile(path.parent.with_name(NAMES[1]) / path.name, path)


@pytest.mark.parametrize("damage", [cut, flip_a_bit, of_another, Path.unlink])
@pytest.mark.parametrize(("part", "rank"), [("part-00002-of-00003.pt", 2), ("whole.pt", 0)])
def test_a_part_that_is_not_what_was_written_is_named(copied, caplog, damage, part, rank):
    damage(copied / NAMES[2] / part)
    newest = newest_good(copied)
    assert newest is not None
    assert newest[0].name == NAMES[1]
    assert f"{part}, which rank {rank} on host-{rank} has written," in caplog.text
    assert not (copied / NAMES[2]).exists()
    assert (copied / f"{NAMES[2]}.bad").is_dir()
    assert (copied / "step-000000002.json.bad").is_file()


def test_where_none_is_left_that_is_said(copied, caplog):
    for step in (1, 2):
        (copied / NAMES[step] / "part-00001-of-00003.pt").unlink()
    assert newest_good(copied) is None
    assert "No checkpoint is left" in caplog.text


def test_without_a_manifest_parts_still_know_each_other(copied):
    of_another(copied / NAMES[2] / "part-00001-of-00003.pt")
    with pytest.raises(ValueError, match=r"part-00001-of-00003\.pt is a part of another checkpoint"):
        SafeCheckpointIO().load_checkpoint(copied / NAMES[2])
    (copied / NAMES[1] / "part-00001-of-00003.pt").unlink()
    with pytest.raises(ValueError, match=r"part-00001-of-00003\.pt is missing: what rank 1 held"):
        SafeCheckpointIO().load_checkpoint(copied / NAMES[1])


# Read ----------------------------------------------------------------------------------------------------------------


def test_whole_where_nothing_is_spread(three):
    for step in (1, 2):
        assert same(SafeCheckpointIO().load_checkpoint(three / "checkpoints" / NAMES[step]), whole(step))


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_reads_its_slices_and_no_more(copied, ranks):
    for alike, taken, held in World(copied.parent, ranks).run(read, NAMES[2], 2):
        assert alike
        assert taken == held


@pytest.mark.faults
def test_copies_are_written_once(tmp_path):
    world = World(tmp_path, ranks=4, hosts=2)
    assert [result[0] for result in world.run(write, [1], None, 9)] == [None] * 4
    folder = tmp_path / "checkpoints" / NAMES[1]
    assert sorted(path.name for path in folder.iterdir()) == ["part-00000-of-00004.pt", "part-00001-of-00004.pt", "whole.pt"]
    assert same(SafeCheckpointIO().load_checkpoint(folder), whole(1))
    for ranks, hosts in ((4, 2), (3, 1)):
        assert all(result[0] for result in World(tmp_path, ranks, hosts).run(read, NAMES[1], 1))


# A step that is written again, and what goes -------------------------------------------------------------------------


def test_a_folder_is_never_written_to_again(tmp_path):
    """The same step once more, where a folder is, or a file: the new one has a name that comes after, and the old one goes."""
    folder = tmp_path / "checkpoints"
    assert World(tmp_path).run(write, [1, 2, 2], None, 2)[0][:3] == [None, None, None]
    assert sorted(path.name for path in folder.glob("*.ckpt")) == [NAMES[1], "step-000000002_02.ckpt"]
    assert newest_good(folder)[0].name == "step-000000002_02.ckpt"
    write_file(folder / NAMES[3], whole(3), {"position": {"global_step": 3}})
    assert World(tmp_path).run(write, [3], None, 2)[0][:1] == [None]
    assert sorted(path.name for path in folder.glob("*.ckpt")) == ["step-000000002_02.ckpt", "step-000000003_02.ckpt"]
    assert sorted(path.stem for path in folder.glob("*.json")) == ["step-000000002_02", "step-000000003_02"]
    assert assert_nothing_is_lost(folder) == 3


def test_the_manifest_names_who_wrote_what(three):
    manifest = json.loads((three / "checkpoints/step-000000002.json").read_text())
    assert {name: (part["rank"], part["host"]) for name, part in manifest["parts"].items()} == {
        "whole.pt": (0, "host-0"),
        **{f"part-0000{rank}-of-00003.pt": (rank, f"host-{rank}") for rank in range(3)},
    }
    for name, part in manifest["parts"].items():
        assert part["bytes"] == os.path.getsize(three / "checkpoints" / NAMES[2] / name)


class Harm:
    """Makes a folder when it is read from a pickle."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_torchs_own_format_of_parts_has_the_code_of_its_folder_run(copied, tmp_path):
    """The reason for a format of our own: a reader of ours runs nothing."""
    dcp = tmp_path / "dcp"
    torch.distributed.checkpoint.save({"weight": torch.zeros(2)}, checkpoint_id=dcp, no_dist=True)
    (dcp / ".metadata").write_bytes(pickle.dumps(Harm(str(tmp_path / "harm"))))
    with pytest.raises(torch.distributed.checkpoint.CheckpointException):  # too late
        torch.distributed.checkpoint.load({"weight": torch.zeros(2)}, checkpoint_id=dcp, no_dist=True)
    assert (tmp_path / "harm").exists()
    for file in (copied / NAMES[2]).glob("*.pt"):
        torch.save(Harm(str(tmp_path / "ours")), file)
    with pytest.raises((UserError, pickle.UnpicklingError)):
        SafeCheckpointIO().load_checkpoint(copied / NAMES[2])
    assert not (tmp_path / "ours").exists()
