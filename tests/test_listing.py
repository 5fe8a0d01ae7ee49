"""The verb `runs`: what it lists, and that it removes nothing without a yes, and never a run in training."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from project.cli import runs
from project.cli.watching import Look
from tests.conftest import TINY, environment

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def run_of(root: Path, name: str, state: str | None = None, step: int = 0, *, age: float = 7200, acc: float = 0.0) -> Path:
    """A run's folder: it was begun and, unless it has no state, stopped."""
    folder = root / "lightning_logs" / name
    (folder / "checkpoints").mkdir(parents=True)
    (folder / ".lock").touch()
    now = time.time() - age
    lines = [{"event": "start", "time": now - 60, "step": 0, "ranks": 2, "hosts": {"h1": 1, "h2": 1}, "of": 100, "pid": 1}]
    if state is not None:
        lines.append({"event": "stop", "time": now, "step": step, "state": state, "why": None})
    (folder / "life.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if acc:
        manifest = {"position": {"global_step": step}, "metrics": {"val/acc": acc, "val/loss": 1 - acc}}
        (folder / f"checkpoints/step-{step:09d}.json").write_text(json.dumps(manifest))
        (folder / f"checkpoints/step-{step:09d}.ckpt").write_bytes(b"0" * 3000)
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (now, now))
    return folder


@pytest.fixture
def five_runs(tmp_path, monkeypatch):
    """Five runs, of which one is in training."""
    run_of(tmp_path, "good", "finished", 100, age=90_000, acc=0.9)
    run_of(tmp_path, "better", "finished", 80, age=8000, acc=0.95)
    (tmp_path / "lightning_logs/better/log.txt").write_text("0" * 10)
    os.utime(tmp_path / "lightning_logs/better/log.txt", (0, 0))
    run_of(tmp_path, "broken", "failed")
    run_of(tmp_path, "gone")
    busy = run_of(tmp_path, "busy", age=10_000)
    (tmp_path / "lightning_logs/notes").mkdir()  # no run
    with subprocess.Popen([sys.executable, "-c", HOLD, busy / ".lock"], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        monkeypatch.chdir(tmp_path)
        yield tmp_path / "lightning_logs"
        holder.stdin.close()


def listed(capsys, *words: str) -> list[dict]:
    assert runs.main(["--json", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_run_of_this_host_whose_process_is_gone_is_lost_at_once(tmp_path):
    folder = run_of(tmp_path, "new", age=-60)

    def state(pid: int, host: str, began: float) -> str:
        start = {"event": "start", "time": began, "step": 0, "ranks": 2, "hosts": {host: 1, "h2": 1}, "of": 100, "pid": pid}
        (folder / "life.jsonl").write_text(f"{json.dumps(start)}\n")
        listed = runs.read_run(folder).state
        assert Look(folder)()[0] == {"running": "going on", "lost": "killed"}[listed]
        return listed

    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    this_host, now = socket.gethostname(), time.time()
    assert state(os.getpid(), this_host, now) == "running"
    assert state(ended.pid, this_host, now) == "lost"
    assert state(ended.pid, "h1", now) == "running"  # whose processes are not seen here
    assert state(os.getpid(), this_host, now - 1e6) == "lost"  # of that number is another one now
    assert state(1 << 70, this_host, now) == "running"


def test_runs_are_listed_sorted_and_filtered(five_runs, capsys):
    known = {run["name"]: run for run in listed(capsys)}
    assert {name: run["state"] for name, run in known.items()} == {
        "good": "finished", "better": "finished", "broken": "failed", "gone": "lost", "busy": "running",
    }  # fmt: skip
    assert known["good"]["metric"] == ["val/acc", 0.9]
    assert known["good"]["hosts"] == ["h1", "h2"]
    assert (known["good"]["step"], known["good"]["of"], known["good"]["ranks"]) == (100, 100, 2)
    assert known["good"]["size"] > 3000
    assert [run["name"] for run in listed(capsys, "--sort", "metric", "--state", "finished")] == ["better", "good"]
    for name in ("good", "better"):
        (five_runs / name / "config.yaml").write_text("checkpoints: {monitor: val/loss, mode: min}")
    assert [run["metric"][1] for run in listed(capsys, "--sort", "metric")[:2]] == [pytest.approx(0.05), pytest.approx(0.1)]
    for name in ("good", "better"):
        (five_runs / name / "config.yaml").unlink()
    assert [run["name"] for run in listed(capsys, "--sort", "size")][:2] == ["better", "good"]
    assert [run["name"] for run in listed(capsys, "--older", "1d")] == ["good"]
    assert {run["name"] for run in listed(capsys, "b*")} == {"better", "broken", "busy"}
    assert runs.main(["nothing*"]) == 1
    capsys.readouterr()
    assert runs.main(["good", "gone"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["run", "state"], ["gone", "lost"], ["good", "finished"]]
    assert "val/acc 0.9" in lines[2]
    assert lines[2].rstrip().endswith("h1 +1")
    with pytest.raises(SystemExit) as end:
        runs.main(["--older", "soon"])
    assert end.value.code == 2


def test_an_evaluation_is_no_run_and_no_sign_of_life_of_one(five_runs, capsys):
    for place in (five_runs / "good/predict-20260101-000000", five_runs / "good/export-onnx", five_runs / "good-test"):
        place.mkdir()
        for name in (".lock", "log.txt", "config.yaml", "predictions.csv"):
            (place / name).write_text("{}")
    (five_runs / "good/report.html").touch()
    known = {run["name"]: run for run in listed(capsys)}
    assert known.keys() == {"good", "better", "broken", "gone", "busy"}
    assert known["good"]["age"] == pytest.approx(90_000, abs=600)
    assert Look(five_runs / "good").age().startswith("last sign of life 1 day, 1:0")


def cleaned(folder: Path, answer: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "project", "runs", "--clean", *words]
    return subprocess.run(command, cwd=folder, env=environment(), input=answer, capture_output=True, text=True, timeout=300)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_nothing_goes_without_a_yes_and_never_what_is_in_training(five_runs):
    before = names(five_runs)
    for answer in ("", "y\n", "no\n", "Yes\n"):
        done = cleaned(five_runs.parent, answer)
        assert (done.returncode, done.stdout.splitlines()[-1].endswith("Nothing is removed.")) == (1, True), done
        assert names(five_runs) == before
    done = cleaned(five_runs.parent, "yes\n")
    assert done.returncode == 0, done
    assert names(five_runs) == before - {"broken", "gone"}  # they have trained nothing
    assert "2 runs with 0 checkpoints" in done.stdout
    done = cleaned(five_runs.parent, "yes\n", "--state", "finished", "--state", "running", "--older", "1d")
    assert "1 run with 1 checkpoint, 3" in done.stdout
    assert names(five_runs) == {"busy", "better", "notes"}
    lines = cleaned(five_runs.parent, "yes\n", "busy").stdout.splitlines()
    assert lines == ["busy: kept: it is in training, or in use by another verb", "There is nothing to remove."]


def test_a_run_that_is_begun_while_somebody_is_asked_is_kept(five_runs, monkeypatch, capsys):
    def answer():
        (five_runs / "gone/log.txt").write_text("begun")
        return "yes\n"

    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"readline": staticmethod(answer)}))
    assert runs.main(["--clean"]) == 0
    assert "gone: kept: it has shown a sign of life" in capsys.readouterr().out
    assert names(five_runs) == {"good", "better", "busy", "notes", "gone"}


def test_a_result_or_a_link_is_no_rubbish(tmp_path, monkeypatch, capsys):
    (run_of(tmp_path, "tested", "failed") / "test.json").write_text("{}")
    elsewhere = run_of(tmp_path / "other", "moved", "failed")
    (tmp_path / "lightning_logs/moved").symlink_to(elsewhere)
    for path in (tmp_path / "lightning_logs/tested").iterdir():
        os.utime(path, (0, 0))
    os.utime(tmp_path / "lightning_logs/tested", (0, 0))
    monkeypatch.chdir(tmp_path)
    assert runs.main(["--clean"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert elsewhere.exists()


@pytest.mark.slow
def test_a_real_run_is_listed_as_it_is(quick, tmp_path, monkeypatch, capsys):
    fitted = quick("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_epochs=2", "--run=it", ranks=2)
    assert fitted.code == 0, fitted.output
    monkeypatch.chdir(tmp_path)
    (run,) = listed(capsys)
    assert (run["state"], run["step"], run["of"], run["ranks"], run["checkpoints"]) == ("finished", 4, 4, 2, 2)
    best = max(
        json.loads(path.read_text())["metrics"]["val/acc"] for path in Path("lightning_logs/it/checkpoints").glob("*.json")
    )
    assert run["metric"] == ["val/acc", best]
    assert not run["disposable"]
