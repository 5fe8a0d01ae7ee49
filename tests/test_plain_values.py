"""Hostile files of torch.save: an error in a line, where numpy's own constructors would read foreign memory."""

import io
import os
import pickle
import random
import signal
import struct
import zipfile
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch

from project.checkpoints.reading import SafeCheckpointIO, read_manifest
from project.checkpoints.writing import write
from project.errors import UserError
from project.plain_values import load
from project.untrusted import read_text

VALUES = {
    "numbers": [
        np.float64(1.5),
        np.bool_(True),
        np.datetime64("2020-01-01T00:00:05", "ns"),
        np.timedelta64(3, "25s"),
        np.int8(-3),
    ],
    "arrays": [
        *(
            np.arange(6.0).reshape(2, 3),
            np.asfortranarray(np.arange(6).reshape(2, 3)),
            np.array(3),
            np.zeros((0, 4), np.float32),
        ),
        *(np.array(["ab", "c"]), np.array([b"x"]), np.arange(3, dtype=">f4"), np.array([1 + 2j]), np.array([True, False])),
        *(np.array(["2020"], "M8[D]"), np.arange(24).reshape(2, 3, 4)[:, ::2]),
    ],
    "states": {"generator": np.random.default_rng(0).bit_generator.state, "old": np.random.RandomState(0).get_state()},
    "types": (np.dtype("f4"), np.dtype(">i2"), np.dtype("M8[ms]")),
    "path": Path("a/b"),
    "tensor": torch.arange(3),
}


def same(value, expected):
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return type(value) is type(expected) and len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, np.ndarray):
        return (
            type(expected) is np.ndarray
            and value.dtype == expected.dtype
            and value.shape == expected.shape
            and (value == expected).all()
        )
    if isinstance(value, torch.Tensor):
        return torch.equal(value, expected)
    return type(value) is type(expected) and value == expected


def test_numpys_values_and_paths_come_back_as_they_were(tmp_path):
    torch.save(VALUES, tmp_path / "file")
    for mmap in (True, False):
        read = load(tmp_path / "file", mmap=mmap)
        assert same(VALUES, read)
        assert read["arrays"][0].flags.writeable


class Made:
    """Pickled as a call, and a state that is set on what it gives."""

    def __init__(self, function, arguments, state=None):
        self.parts = (function, arguments, state) if state is not None else (function, arguments)

    def __reduce__(self):
        return self.parts


FLOAT, OBJECT = np.dtype("f8"), np.dtype("O")
reconstruct = np.zeros(1).__reduce__()[0]
scalar = np.float64(1).__reduce__()[0]


def array(state):
    return Made(reconstruct, (np.ndarray, (0,), b"b"), state)


RECORD = (3, "<", None, ("a",), {"a": (np.dtype("f8"), 1 << 40)}, 8, 1, 16)
HOSTILE = {
    "objects at any address": array((1, (4,), OBJECT, False, [1, 2, 3, 4])),
    "object bytes": array((1, (4,), OBJECT, False, struct.pack("4Q", 1, 2, 3, 4))),
    "an object scalar": Made(scalar, (OBJECT, struct.pack("Q", 4096))),
    "a field outside": Made(np.dtype, ("V16", False, True), RECORD),
    "a float with fields": array((1, (1,), Made(np.dtype, ("f8", False, True), RECORD), False, bytes(8))),
    "too few bytes": array((1, (1 << 40,), FLOAT, False, bytes(8))),
    "sizes that wrap": array((1, (1 << 32, 1 << 32), FLOAT, False, bytes(8))),
    "a negative size": array((1, (-1, -1), FLOAT, False, bytes(8))),
    "a scalar of few bytes": Made(scalar, (FLOAT, b"1")),
    "a list for a shape": array((1, "ab", FLOAT, False, bytes(8))),
    "a text for a state": array("state"),
    "no dtype": array((1, (1,), "f8", False, bytes(8))),
    "a command": Made(os.system, ("touch ran",)),
    "an array from a buffer": Made(np.ndarray, ((1 << 40,), FLOAT, bytes(8))),
    "a tensor that is stretched": torch.zeros(1).expand(1 << 40),
    "lists in lists": reduce(lambda inner, _: [inner], range(300), []),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_value_is_refused(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    torch.save({"state": HOSTILE[case]}, "file")
    try:
        read = load(Path("file"))["state"]
    except (pickle.UnpicklingError, ValueError, TypeError):
        pass
    else:
        assert isinstance(read, np.ndarray), case
        assert read.nbytes < 100, "made of nothing, as numpy.empty(0)"
    assert not Path("ran").exists()


def test_mutated_checkpoints_are_read_or_refused(quick_checkpoint, tmp_path, request):
    """In a process for each, as an accident of memory would end it."""
    content, chance, path = quick_checkpoint, random.Random(0), tmp_path / "file"
    count = 2_000 if request.config.getoption("--faults") else 20
    pickled = content.index(b"data.pkl"), content.index(b"PK", content.index(b"data.pkl"))
    refused = 0
    for _ in range(count):
        damaged = bytearray(content)
        for _ in range(chance.choice([1, 1, 3, 20])):
            damaged[chance.randrange(*(pickled if chance.random() < 0.8 else (0, len(content))))] = chance.randrange(256)
        path.write_bytes(damaged)
        if (child := os.fork()) == 0:
            signal.alarm(10)
            try:
                SafeCheckpointIO().load_checkpoint(path)
                os._exit(0)
            except UserError:
                os._exit(2)
            except BaseException:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 2), code
        refused += code == 2
    assert count // 4 < refused < count


@pytest.fixture
def quick_checkpoint():
    """As a run leaves it, with arrays in a callback's state."""
    content = io.BytesIO()
    weights = {f"layer.{number}": torch.randn(3, 4) for number in range(5)}
    torch.save({"state_dict": weights, "callbacks": {"mine": VALUES}, "loops": {"fit_loop": {"a": [1, 2.5, None]}}}, content)
    return content.getvalue()


def test_an_archive_that_unpacks_to_more_than_it_has_is_refused(tmp_path):
    content = io.BytesIO()
    torch.save({"x": torch.zeros(1000)}, content)
    with zipfile.ZipFile(content) as old, zipfile.ZipFile(tmp_path / "file", "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry) if not entry.filename.endswith("data/0") else bytes(1 << 26))
    with pytest.raises(pickle.UnpicklingError, match="unpacks to more"):
        load(tmp_path / "file")


def test_pipes_devices_and_foreign_names_are_not_read(tmp_path):
    """Each of these would be read for ever, or lies elsewhere."""
    path = tmp_path / "step-000000001.ckpt"
    write(path, {"x": 1}, {"step": 1})
    manifest = path.with_suffix(".json")
    text = manifest.read_text()
    for make in (os.mkfifo, lambda place: os.symlink("/dev/zero", place)):
        for place in (path, manifest):
            content = place.read_bytes()
            place.unlink()
            make(place)
            with pytest.raises((ValueError, OSError), match="no regular file"):
                read_manifest(path)
            with pytest.raises(OSError, match="no regular file"):
                load(place)
            place.unlink()
            place.write_bytes(content)
    manifest.write_text('{"parts": {"../../other": {"bytes": 1, "sha256": "", "rank": 0, "host": ""}}}')
    with pytest.raises(ValueError, match="no name of a part"):
        read_manifest(path)
    for garbage in ("[" * 100_000, "null", "[]", '{"parts": 3}', '{"bytes": {}, "sha256": 1}', "\udcff"):
        manifest.write_bytes(garbage.encode(errors="surrogateescape"))
        with pytest.raises((ValueError, OSError)):
            read_manifest(path)
    manifest.write_text(text)
    read_manifest(path)
    with pytest.raises(OSError, match="more than"):
        read_text(manifest, 10)
