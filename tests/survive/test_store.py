"""A run whose host is lost with its disk: its folder is copied to a store, and another host goes on from there."""

import copy
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project import Trainer as OurTrainer
from project.checkpoints.callback import Checkpoints, checkpoints_of
from project.checkpoints.store import Store
from project.errors import FaultError, UserError
from tests.cluster.machine import missing, wait_until
from tests.conftest import environment, fork, forked
from tests.own import PointsData, Regression
from tests.survive.test_resume import curves, final, same

FIT = (
    *("fit", "--model=tests.own.Regression", "--data=tests.own.PointsData", "--run=it", "--trainer.accelerator=cpu"),
    *("--trainer.max_steps=14", "--trainer.global_batch_size=12", "--trainer.log_every_n_steps=1", "--trainer.exact=true"),
    *("--checkpoints.every_n_steps=2",),
)
STEPS = 14


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class LostHost(Callback):
    """Kills a rank as soon as the store has a checkpoint."""

    def __init__(self, store: str, rank: int) -> None:
        self.store, self.rank = Path(store), rank

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 9 and trainer.global_rank == self.rank:
            wait_until(lambda: [*self.store.glob("it/checkpoints/step-*6.json")], 60, "in the store")
            os.kill(os.getpid(), signal.SIGKILL)


def lost(store: Path | str, rank: int = 0) -> str:
    callback = {"class_path": "tests.survive.test_store.LostHost", "init_args": {"store": str(store), "rank": rank}}
    return f"--trainer.callbacks+={json.dumps(callback)}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = forked(folder := tmp_path_factory.mktemp("whole"), *FIT)
    assert done.code == 0, done.output
    return folder


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    """The disks of three hosts, of which none sees another's."""
    folders = [tmp_path / name for name in ("h1", "h2", "h3")]
    for folder in folders:
        folder.mkdir()
    return folders


def files(folder: Path) -> dict[str, int]:
    """The sizes of what a run has written, but for its lock, its owner and its settings."""
    own = (".lock", "owner.txt", "config.yaml")
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in own]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def test_a_run_continues_on_a_host_that_lacks_its_folder(whole: Path, hosts: list[Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    words = (*FIT, f"--checkpoints.copy_to={store}")
    killed = forked(hosts[0], *words, lost(store, rank=2), ranks=3, one_machine=True)
    assert killed.code == -signal.SIGKILL, killed.output
    resumed = forked(hosts[1], *words, ranks=2)
    assert resumed.code == 0, resumed.output
    assert "Resumes from" in resumed.output
    actual, expected = final(hosts[1], STEPS), final(whole, STEPS)
    assert same(actual["state_dict"], expected["state_dict"])
    assert same(actual["optimizer_states"], expected["optimizer_states"])
    assert curves(hosts[1]) == curves(whole)
    assert files(store / "it") == files(hosts[1] / "lightning_logs/it")  # older checkpoints are gone there, too

    again = forked(hosts[0], *words, ranks=3)  # which has an older state on its own disk
    assert again.code == 0, again.output
    assert "nothing was left to do" in again.output
    assert same(final(hosts[0], STEPS)["state_dict"], expected["state_dict"])


def test_a_sharded_run_continues_on_a_host_that_lacks_its_folder(hosts: list[Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    words = (*FIT, f"--checkpoints.copy_to={store}", "--trainer.strategy=sharded")
    killed = forked(hosts[0], *words, lost(store), ranks=3, one_machine=True)
    assert killed.code == -signal.SIGKILL, killed.output
    resumed = forked(hosts[1], *words, ranks=2)
    assert resumed.code == 0, resumed.output
    assert "Resumes from" in resumed.output
    assert [path.name for path in (store / f"it/checkpoints/step-{STEPS:09d}.ckpt").glob("whole*")] == ["whole.pt"]
    assert files(store / "it") == files(hosts[1] / "lightning_logs/it")


class TakenForDead(Callback):
    """Waits at a step until another start has taken over."""

    def __init__(self, owner: str) -> None:
        self.owner = Path(owner)

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 3:
            before = self.owner.read_text()
            wait_until(lambda: self.owner.read_text() != before, 120, "another start")


def test_an_older_start_that_is_still_alive_ends_and_changes_nothing(hosts: list[Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    words = (*FIT, f"--checkpoints.copy_to={store}")
    waiting = {"class_path": "tests.survive.test_store.TakenForDead", "init_args": {"owner": str(store / "it/owner.txt")}}
    callback = f"--trainer.callbacks+={json.dumps(waiting)}"
    older = fork("project.cli.main:main", hosts[0], *words, callback, output=tmp_path / "older")
    wait_until(lambda: [*store.glob("it/checkpoints/*.ckpt")], 120, lambda: (tmp_path / "older").read_text())
    newer = forked(hosts[1], *words)
    older.join(120)
    assert newer.code == 0, newer.output
    assert older.exitcode == 1
    assert "ERROR   The run was started again, by " in (tmp_path / "older").read_text()
    assert files(store / "it") == files(hosts[1] / "lightning_logs/it")


def fit(folder: Path, steps: int, *callbacks: Callback, path: str | None = None) -> OurTrainer:
    trainer = OurTrainer(
        default_root_dir=folder, max_steps=steps, max_epochs=-1, accelerator="cpu", enable_progress_bar=False,
        callbacks=[*callbacks],
    )  # fmt: skip
    trainer.fit(Regression(), PointsData(), ckpt_path=path)
    return trainer


def test_a_script_continues_its_newest_run_on_another_host(
    hosts: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def saving() -> Checkpoints:
        return Checkpoints(every_n_steps=2, copy_to=str(tmp_path / "store"))

    copied = copy.deepcopy(fit(hosts[0] / "run", 5, saving()))
    assert copied.global_step == 5
    assert fit(hosts[1] / "run", 9, saving(), path="last").global_step == 9
    assert f"Restored all states from the checkpoint at {hosts[1]}/run/checkpoints/step-000000005.ckpt" in caplog.text
    assert files(tmp_path / "store/run") == files(hosts[1] / "run")


class Away(Callback):
    """Takes the store away at one step, and gives it back at another."""

    def __init__(self, store: Path, back: int) -> None:
        self.store, self.back = store, back

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved = checkpoints_of(trainer)
        assert saved is not None
        assert saved.store is not None
        if trainer.global_step == 5:
            saved.wait()
            saved.store.send()  # nothing is being copied meanwhile
            self.store.rename(self.store.with_name("away"))
            self.store.write_text("not a folder")
        if trainer.global_step == 8:
            wait_until(lambda: saved.store.failed, 60, "failed")
        if trainer.global_step == self.back:
            self.store.unlink()
            self.store.with_name("away").rename(self.store)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_store_that_is_away_stops_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture, comes_back: bool) -> None:
    store = tmp_path / "store"
    saving = Checkpoints(every_n_steps=2, copy_to=str(store))
    trainer = fit(tmp_path / "run", 12, saving, Away(store, back=10 if comes_back else 1000))
    assert trainer.global_step == 12
    assert caplog.text.count("The run's folder can't be copied to") == 1
    assert saving.store is not None
    assert (saving.store.failed is None) is comes_back
    if comes_back:
        assert files(store / "run") == files(tmp_path / "run")


def test_a_run_whose_last_copy_fails_says_so(tmp_path: Path) -> None:
    away = {"class_path": "tests.survive.test_store.Away", "init_args": {"store": str(tmp_path / "store"), "back": 1000}}
    words = (f"--checkpoints.copy_to={tmp_path / 'store'}", f"--trainer.callbacks+={json.dumps(away)}")
    done = forked(tmp_path, *FIT, *words)
    assert done.code == 1
    assert "ERROR   The run is over, and its last checkpoint could not be copied: " in done.output


def test_a_store_that_can_not_be_used_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="The store s4://bucket can't be used: Protocol not known"):
        Store("s4://bucket", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FaultError, match=r"can't be written: .*HINT"):
        fit(tmp_path / "run", 5, Checkpoints(copy_to=str(tmp_path / "file")))


def test_neither_secrets_nor_what_is_no_file_of_a_run_is_copied(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("model:\n  api_key: abc123\n  width: 8\n")
    (run / ".lock").write_text("")
    (run / "link").symlink_to("/etc/passwd")
    store = Store(str(tmp_path / "store"), run)
    store.claim()
    store.send()
    assert store.failed is None
    assert [path.name for path in (tmp_path / "store/run").iterdir() if path.name != "owner.txt"] == ["config.yaml"]
    assert "abc123" not in (tmp_path / "store/run/config.yaml").read_text()
    assert "width: 8" in (tmp_path / "store/run/config.yaml").read_text()


def test_what_a_store_has_leads_nowhere_else(tmp_path: Path) -> None:
    """Names that no run has are left there, and a link here is replaced, not followed."""
    fit(tmp_path / "h1/run", 4, Checkpoints(copy_to=str(tmp_path / "store")))
    (tmp_path / "store/run/.bashrc").write_text("")
    (tmp_path / "h2/run").mkdir(parents=True)
    (tmp_path / "h2/run/life.jsonl").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("gold")
    Store(str(tmp_path / "store"), tmp_path / "h2/run").fetch()
    assert files(tmp_path / "h2/run") == files(tmp_path / "h1/run")
    assert (tmp_path / "precious").read_text() == "gold"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server that speaks S3's protocol, and a bucket there."""
    try:
        import moto
        import s3fs
    except ImportError:
        missing("s3fs and moto")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "no_proxy": "*",
    }
    for name, value in {**settings, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", f"{moto.__name__}.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        for line in server.stderr:
            if "Running on" in line:
                break
        files = s3fs.S3FileSystem(skip_instance_cache=True)
        files.mkdir("bucket")
        yield files
        server.terminate()


def test_a_run_continues_from_s3(s3: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    url = "s3://bucket/runs"
    fit(tmp_path / "h1/run", 5, Checkpoints(every_n_steps=2, copy_to=url))
    resumed = fit(tmp_path / "h2/run", 9, Checkpoints(every_n_steps=2, copy_to=url), path="last")
    assert resumed.global_step == 9
    assert "Brings the run from s3://bucket/runs: step-000000005.ckpt" in caplog.text
    s3.invalidate_cache()
    stored = {name.removeprefix("bucket/runs/run/"): size for name, size in s3.du("bucket/runs/run", total=False).items()}
    assert stored.pop("owner.txt")
    assert stored == files(tmp_path / "h2/run")
    with pytest.raises(FaultError, match="The store s3://bukket can't be written: The specified bucket does not exist"):
        fit(tmp_path / "other", 5, Checkpoints(copy_to="s3://bukket"))
    assert torch.load(tmp_path / "h2/run/checkpoints/step-000000009.ckpt", weights_only=True)["global_step"] == 9
