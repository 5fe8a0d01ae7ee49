"""Text as bytes: which file is in which split, windows, and files that are whole whoever writes them."""

import multiprocessing
import pickle
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from project.data.text import (
    SPLITS,
    TextData,
    Windows,
    batch_of,
    files_of,
    is_whole,
    pair_counts,
    read_splits,
    simple_losses,
    split_of,
    write_whole,
)
from tests.own import write_texts


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


def data_of(texts, root, **settings):
    return TextData(text=str(texts), root=root, **{"context": 16, "held_out": 0.2, **settings})


@pytest.fixture
def data(texts, tmp_path):
    prepared = data_of(texts, tmp_path / "bytes", num_workers=2)
    prepared.prepare_data()
    return prepared


@given(st.lists(st.text(min_size=1), min_size=1, max_size=50, unique=True), st.floats(0.01, 0.49))
def test_a_files_split_follows_from_its_name(names, held_out):
    for name in names:
        split = split_of(name, held_out)
        assert split in SPLITS
        if split == "val":
            assert split_of(name, held_out * 1.01) == "val"  # a larger share takes, and gives nothing back


def test_a_name_means_the_same_split_everywhere():
    names = {"train": ["os.py", "0.txt"], "val": ["4.txt", "5.txt"], "test": ["json/decoder.py", "6.txt"]}
    assert all(split_of(name, 0.2) == split for split, some in names.items() for name in some)


@given(st.binary(max_size=200), st.integers(1, 20))
def test_windows_are_the_text_in_order(tmp_path_factory, content, context):
    path = tmp_path_factory.mktemp("windows") / "text.npy"
    write_whole(path, content)
    windows = Windows(path, context)
    assert len(windows) == max(0, len(content) - 1) // context
    for index in range(len(windows)):
        tokens, following = batch_of([windows[index]])
        start = index * context
        assert bytes(tokens[0].tolist()) == content[start : start + context]
        assert bytes(following[0].tolist()) == content[start + 1 : start + 1 + context]
        assert tokens.dtype == following.dtype == torch.int64
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_every_byte_is_in_the_split_of_its_file(texts, data):
    _, files = files_of(str(texts))
    assert list(files) == sorted(files)
    for split in SPLITS:
        contents = [path.read_bytes() for name, path in files.items() if split_of(name, 0.2) == split]
        assert contents
        assert data.windows(split).tokens.tobytes() == b"".join(text + b"\0" for text in contents)


def test_pythons_own_library_without_its_tests():
    label, files = files_of(None)
    assert label.startswith("python-3.")
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= files.keys()
    assert not [name for name in files if "site-packages" in name or "/tests/" in name or name.startswith("test/")]


def test_another_text_has_another_name(texts):
    first, _ = read_splits(str(texts), 0.2)
    assert first.startswith("texts-")
    assert read_splits(str(texts), 0.2)[0] == first
    assert read_splits(str(texts), 0.3)[0] != first  # the same text in other splits
    (texts / "5.txt").write_text((texts / "5.txt").read_text().replace("F", "f", 1))
    assert read_splits(str(texts), 0.2)[0] != first


@pytest.mark.parametrize("left", [0, 40, 500])
def test_a_file_that_was_cut_off_is_made_again(data, left):
    path = data.path("train")
    content = path.read_bytes()
    path.write_bytes(content[:left])
    assert not is_whole(path)
    with pytest.raises(ValueError, match="is not there, or not whole"):
        data.setup("fit")
    data.prepare_data()
    assert path.read_bytes() == content
    data.setup("fit")


def _prepare_often(texts, root, barrier):
    data = data_of(texts, root)
    for _ in range(10):
        data.prepare_data()
        barrier.wait(60)
        for split in SPLITS:
            write_whole(data.path(split), data.windows(split).tokens.tobytes())


def test_several_processes_prepare_at_once(texts, tmp_path):
    """Whoever looks finds nothing or all of it, and nothing else is left."""
    (texts / "0.txt").write_text("a long text " * 100_000)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [context.Process(target=_prepare_often, args=(texts, tmp_path / "bytes", barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    data, sizes = data_of(texts, tmp_path / "bytes"), set()
    while any(process.is_alive() for process in processes):
        sizes |= {path.stat().st_size for path in data.root.glob("texts-*-train.npy")}
    assert [process.exitcode for process in processes] == [0, 0, 0]
    data.prepare_data()
    assert sizes == {data.path("train").stat().st_size}
    assert sorted(path.name for path in data.root.iterdir()) == sorted(data.path(split).name for split in SPLITS)


def test_loader_processes_get_a_path_and_no_copy(data):
    windows = data.windows("val")
    first = windows[0]
    sent = pickle.dumps(windows)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent)[0], first)
    tokens = torch.cat([tokens for tokens, _ in data.val_dataloader()])
    assert bytes(tokens.flatten().tolist()) == windows.tokens[: tokens.numel()].tobytes()


def test_a_split_without_a_window_is_refused(tmp_path):
    texts = write_texts(tmp_path / "texts", files=1)
    with pytest.raises(ValueError, match=r"split of .* has 0 bytes, which is no window of 16\. HINT: whole files are held out"):
        data_of(texts, tmp_path / "bytes").prepare_data()


def test_hosts_have_the_same_text(data):
    data.trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda name: "python-3.9.1-abc"))
    with pytest.raises(ValueError, match=r"another text than rank 0's: texts-\w+, and not python-3.9.1-abc. HINT"):
        data.setup("fit")


def test_a_run_goes_on_with_its_text(data):
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"))
    data.load_state_dict(data.state_dict())
    with pytest.raises(ValueError, match=r"was trained on python-3.9.1-abc, and this is texts-\w+. HINT"):
        data.load_state_dict({"text": "python-3.9.1-abc"})


@given(st.binary(min_size=2, max_size=300), st.binary(min_size=2, max_size=300))
def test_what_counting_reaches(train, val):
    """By the definition, pair by pair."""
    pairs = [*pairwise(train)]
    val_pairs = [*pairwise(val)]
    unigram = [(sum(b == two for _, b in pairs) + 1) / (len(pairs) + 256) for _, two in val_pairs]
    bigram = [(pairs.count(pair) + 1) / (sum(a == pair[0] for a, _ in pairs) + 256) for pair in val_pairs]
    for block in (1, 7):  # a long text is counted in pieces, whose borders are pairs, too
        tokens = np.frombuffer(train, np.uint8)
        assert np.array_equal(pair_counts(tokens, block), pair_counts(tokens))
    losses = simple_losses(np.frombuffer(train, np.uint8), np.frombuffer(val, np.uint8))
    assert losses == pytest.approx((-np.log(unigram).mean(), -np.log(bigram).mean()))
