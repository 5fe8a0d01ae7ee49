"""Whose fault an error is: what is printed of it hangs on that."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, _utils

from project.data.order import Order
from project.errors import FaultError, UserError
from project.survive.failure import exit_code, kind, message


def raised(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


class Killed(Dataset):
    """Ends its loader process as a full /dev/shm does."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGBUS)


def test_a_loader_process_has_its_signal_though_torch_was_not_notified(monkeypatch):
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    batches = iter(DataLoader(Killed(), num_workers=1))
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as where torch asks whether it is alive before the notice arrives
    try:
        with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
            next(batches)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert re.search(r"Loader process \d+ of this rank was killed by signal 7. HINT: /dev/shm", message(caught.value))


def test_a_bug_of_ours_keeps_its_traceback():
    """A ValueError that this package's code runs into is not one that it raises for the user."""
    bug = raised(lambda: Order(10, "4", 1, 0).weight(0, 0))
    assert kind(bug) == "crash"
    assert "Traceback" in message(bug)
    code = compile("a, b = 1, 2, 3", "project/trainer.py", "exec")
    assert kind(raised(lambda: exec(code))) == "crash"


def test_what_a_user_can_mend_is_its_message():
    mistake = raised(lambda: (_ for _ in ()).throw(UserError("No. HINT: yes.")))
    assert (kind(mistake), message(mistake)) == ("mendable", "No. HINT: yes.")


@pytest.mark.parametrize(
    "text", ["This layer needs NCCL.", "gloo is not what I want", "no ProcessGroup was given", "my ProcessGroup is empty"]
)
def test_an_error_that_only_names_the_network_is_the_users_own(text):
    assert kind(RuntimeError(text)) == "crash"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:7936"),
        RuntimeError(
            "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation"
        ),
        RuntimeError("Gloo connectFullMesh failed with [h2]: no route"),
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited"),
        dist.DistNetworkError("The client socket has timed out after 60000ms"),
    ],
    ids=lambda error: str(error)[-20:],
)
def test_a_rank_that_is_gone(error):
    assert kind(error) == "lost"


@pytest.mark.parametrize("text", ["Broken pipe", "the camera says: Connection reset by peer"])
def test_an_error_that_a_user_raises_in_such_words_is_the_users_own(text):
    code = compile("raise RuntimeError(text)", "/home/somebody/net.py", "exec")
    error = raised(lambda: exec(code, {"text": text}))
    assert kind(error) == "crash"
    assert "Traceback" in message(error)


@pytest.mark.parametrize(("place", "expected"), [("distributed/distributed_c10d.py", "lost"), ("_utils.py", "crash")])
def test_whose_error_it_is_follows_from_where_it_was_raised(place, expected):
    """What happened in a loader's process is raised again by torch/_utils.py."""
    code = compile("raise RuntimeError('writev: Broken pipe')", str(Path(torch.__file__).parent / place), "exec")
    assert kind(raised(lambda: exec(code))) == expected


def of_cause(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("a wrong key"), 2),
        (FaultError("no route to rank 0"), 1),
        (of_cause(UserError("can't be read"), OSError(5, "Input/output error")), 1),  # a disk that is away for a moment
        (of_cause(UserError("can't be read"), FileNotFoundError(2, "No such file")), 2),  # a wrong path
        (UserError("You requested gpu: [0, 1]\n But your machine only has: [0]"), 1),  # on another host it works
    ],
)
def test_what_a_machine_is_the_cause_of_may_be_started_again(error, code):
    assert exit_code(error) == code
