"""The checks of a host that joins a run again: each on what it is to find."""

import errno
import os

import pytest
import torch

from project.doctor import joining


def test_a_host_that_works_is_fit(tmp_path):
    assert joining.reasons(tmp_path) == []


def test_a_product_that_is_wrong_in_one_place_is_noticed(monkeypatch):
    multiply = torch.Tensor.__matmul__

    def flip(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        if product.ndim == 2:
            product[700, 3] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", flip)
    assert joining.compute(torch.device("cpu")) == "cpu has computed a product wrongly"


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.EIO, "a file in FOLDER: Input/output error"), (errno.EROFS, ""), (errno.ENOSPC, "")]
)
def test_a_disk_that_is_broken_is_named_and_one_that_can_not_be_written_is_none(monkeypatch, tmp_path, code, reason):
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    assert joining.disk(tmp_path) == reason.replace("FOLDER", str(tmp_path))


def test_a_check_that_does_not_end_is_a_reason(monkeypatch, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(joining, "_PATIENCE", 0.2)
    monkeypatch.setattr(joining, "checks", lambda folder: {"the disk check": pipe.read_text, "another": lambda: "broken"})
    try:
        assert joining.reasons(tmp_path) == ["the disk check did not end within 0 s", "broken"]
    finally:
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
