"""Messages about a run: a server on the loopback address is told that a rank was killed; no secret is left anywhere."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from project.errors import UserError
from project.watch.notifier import Limits, event_of
from project.watch.notify import Notify
from tests.cluster.machine import wait_until
from tests.conftest import TINY
from tests.survive.test_resume import faults

FIT = ("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_epochs=3", "--run=it", "--notify.webhook=HOOK")
SECRET = "s3cr3t-path"


@pytest.fixture
def hook():
    """An address that takes messages, and the list of those that came."""
    received: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/{SECRET}", received
    server.shutdown()
    server.server_close()


def kinds(received: list[dict]) -> list[str]:
    return [message["run"]["kind"] for message in received]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_is_killed_is_told(quick, tmp_path, hook, ranks):
    """With one rank, it is the one that would have told it."""
    address, received = hook
    killed = quick(*FIT, faults({"step": 4, "rank": ranks - 1}), ranks=ranks, HOOK=address)
    assert killed.code != 0, killed.output
    wait_until(lambda: received, 60, lambda: killed.output)
    assert kinds(received) == ["lost"]
    assert received[0]["text"].startswith("it on ")
    assert received[0]["run"]["name"] == "it"

    # Nobody who reads the run's files, or what it printed, can write to that address.
    assert SECRET not in killed.output
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "life.jsonl" for path in files)
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_the_end_and_a_loss_that_is_not_finite_are_told(quick, tmp_path, hook):
    address, received = hook
    done = quick(*FIT, "--notify.command=sh -c 'cat > told.json'", HOOK=address)
    assert done.code == 0, done.output
    assert kinds(received) == ["end"]  # when the program has ended, the message is there
    assert json.loads((tmp_path / "told.json").read_text()) == received[0]
    failed = quick(*FIT, "--run=other", "--model.optimizer.init_args.lr=1e30", HOOK=address)
    assert failed.code == 1, failed.output
    wait_until(lambda: len(received) > 1, 60, lambda: failed.output)
    assert kinds(received) == ["end", "nan"]
    assert "is not finite" in received[1]["text"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_of_ones_own_is_no_lost_rank_whatever_its_words(quick, tmp_path, hook, ranks):
    address, received = hook
    failed = quick(*FIT, "--trainer.callbacks+=tests.own.LosesDatabase", ranks=ranks, HOOK=address)
    assert failed.code == 1, failed.output
    wait_until(lambda: received, 60, lambda: failed.output)
    assert kinds(received) == ["failure"]
    assert "the database connection was closed" in received[0]["text"]


@pytest.mark.slow
def test_a_server_that_does_not_answer_stops_nothing(quick):
    run = quick(*FIT, HOOK="http://127.0.0.1:9/" + SECRET)
    assert run.code == 0, run.output


def test_messages_of_a_kind_are_rare_over_all_starts(tmp_path):
    path = tmp_path / "notified.json"
    assert [Limits(path, 60).passes("lost") for _ in range(3)] == [0, None, None]
    assert Limits(path, 60).passes("end") == 0
    assert Limits(path, 0).passes("lost") == 2  # held back so far
    path.write_text("[1, 2")
    assert Limits(path, 60).passes("lost") == 0


@pytest.mark.parametrize(
    ("state", "entry", "kind"),
    [
        ("finished", {}, "end"),
        ("stopped", {"why": "SIGTERM"}, "stopped"),
        ("failed", {"why": "The loss of step 5 (epoch 2) is not finite: rank 1", "kind": "nan"}, "nan"),
        ("failed", {"why": "The run hangs: rank 1 on h2 makes no progress", "kind": "hang"}, "hang"),
        ("killed", {"why": "rank 0 on h1 was killed by signal 9.", "kind": "lost"}, "lost"),
        ("failed", {"why": "RuntimeError: the database connection was closed"}, "failure"),
        ("failed", {"why": "RuntimeError: the loss of contrast is not finite: it hangs", "kind": ["nan"]}, "failure"),
    ],
)
def test_the_line_says_what_kind_of_end_it_was(state, entry, kind):
    line = json.dumps({"event": "stop", "time": time.time(), "step": 5, "state": state, **entry})
    event = event_of(line.encode())
    assert event is not None
    assert event.kind == kind
    for broken in (b"{", b"[]", b'{"event": "stop"}', b'{"event": 1, "time": "x"}', b"[" * 100_000):
        assert event_of(broken) is None


def test_an_address_in_the_yaml_is_refused_and_not_shown():
    with pytest.raises(UserError, match="names an environment variable") as error:
        Notify(webhook=f"https://hooks.example/{SECRET}")
    assert SECRET not in str(error.value)


def test_a_command_whose_program_is_not_there_is_refused_at_the_start_and_named_where_a_run_resumes(tmp_path, caplog):
    trainer = SimpleNamespace(is_global_zero=True, fast_dev_run=False, default_root_dir=str(tmp_path))
    notify = Notify(command="nowhere_to_be_seen -s training", webhook="NO_HOOK")
    with pytest.raises(UserError, match=r"no program nowhere_to_be_seen on .*HINT"):
        notify.on_fit_start(trainer, None)
    (tmp_path / "life.jsonl").touch()
    notify.on_fit_start(trainer, None)
    notify.teardown(trainer, None, "fit")
    assert "the training continues" in caplog.text
    assert "the environment has no NO_HOOK" in caplog.text


def test_a_straggler_is_written_down_and_the_warden_still_records_the_end(tmp_path):
    from project.survive.life import add_stop

    life = tmp_path / "life.jsonl"
    lines = [{"event": "start", "pid": 7}, {"event": "straggler", "pid": 7, "why": "rank 1 is slow"}]
    life.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert not add_stop(life, 8, 3, "killed", None)
    assert add_stop(life, 7, 3, "killed", None)
    assert not add_stop(life, 7, 3, "killed", None)
