"""Who can do what to a run: docs/trust.md has a line for each of these tests."""

import json
import os
import pickle
import shlex
import stat
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from project import Trainer
from project.launch.agent_rendezvous import guard
from project.masking import masked_command
from tests.conftest import PATIENCE, ROOT, TINY, environment, program
from tests.strangers import listeners, on_loopback

FIT = (
    "fit",
    "--config=configs/ddp.yaml",
    *TINY,
    "--trainer.max_steps=8",
    "--data.batch_size=16",
    "--data.global_batch_size=32",
    "--run=it",
)


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def stranger(**how):
    return "--trainer.callbacks=" + json.dumps([{"class_path": "tests.strangers.Stranger", "init_args": how}])


def exposed(folder: Path) -> list[str]:
    """What listens to more than this host."""
    lines = (folder / "listeners-0.txt").read_text().splitlines()
    assert any(line.startswith("udp") for line in lines), "the ranks' heartbeats were seen"
    return [line for line in lines if not on_loopback(line.split()[1])]


def test_nothing_of_a_run_on_one_host_listens_to_another(cli, tmp_path):
    run = cli(*FIT, stranger(), "--trainer.devices=2")
    assert run.code == 0, run.output
    assert exposed(tmp_path) == []


@pytest.mark.slow
def test_nothing_of_launch_sh_on_one_node_listens_to_another(tmp_path):
    script = [str(ROOT / "scripts/launch.sh"), *FIT, stranger()]
    settings = environment(NPROC_PER_NODE="2", PROJECT_PYTHON=sys.executable)
    done = subprocess.run(script, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert exposed(tmp_path) == []


def test_a_stranger_who_sends_to_every_port_changes_nothing(quick, tmp_path, request):
    """Datagrams that once ended a rank, and connections that say nothing which makes sense."""
    count = 10_000 if request.config.getoption("--faults") else 500
    for name, sends in (("quiet", 0), ("busy", count // 8)):
        run = quick(*FIT[:-1], f"--run={name}", stranger(sends=sends), ranks=2)
        assert run.code == 0, run.output
    assert int((tmp_path / "clients.txt").read_text()) >= count
    same = program(tmp_path, "same", "quiet", "busy")
    assert same.code == 0, same.output


def test_what_lies_in_the_store_of_torchruns_agents_runs_no_code(tmp_path, monkeypatch):
    """Their state is a pickle, which anybody who reaches their port can write."""
    state = _RendezvousState()
    state.participants[_NodeDesc("h1", 1, 0)] = 0
    state.last_heartbeats[_NodeDesc("h1", 1, 0)] = datetime.now(timezone.utc)
    monkeypatch.setattr(dynamic_rendezvous, "pickle", pickle)
    monkeypatch.setattr(c10d_rendezvous_backend, "TCPStore", c10d_rendezvous_backend.TCPStore)
    guard()
    read = dynamic_rendezvous.pickle.loads(dynamic_rendezvous.pickle.dumps(state))
    assert vars(read) == vars(state)
    for hostile in (pickle.dumps(Runs(tmp_path / "ran")), b"", b"\x80\x05X", pickle.dumps([1])[:-1]):
        with pytest.raises(pickle.PickleError):
            dynamic_rendezvous.pickle.loads(hostile)
    assert not (tmp_path / "ran").exists()


def listening_of(folder: Path, words: tuple[str, ...]) -> set[str]:
    """Runs a program, and returns who of it, and of what it starts, listens to more than this host, at any time."""
    listening: set[str] = set()
    with (folder / "output.txt").open("w") as output:
        program = [sys.executable, "-m", "project", *words]
        process = subprocess.Popen(program, cwd=folder, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        seen = 0
        while process.poll() is None:
            now = listeners(folder)
            seen += len(now)
            listening |= {
                f"{listener.address} {listener.port} {listener.program}"
                for listener in now
                if not on_loopback(listener.address)
            }
            time.sleep(0.03)  # without a pause these looks take a whole core, which the program needs
    assert process.returncode == 0, (folder / "output.txt").read_text()
    assert seen, "somebody was seen to listen"
    return listening


@pytest.mark.slow
def test_nothing_of_the_doctor_listens_to_another_host(tmp_path):
    assert listening_of(tmp_path, ("doctor", *FIT[1:-1], "--trainer.devices=2")) == set()


@pytest.mark.slow
def test_nothing_of_ray_on_one_host_listens_to_another(tmp_path):
    """Ray's own processes, too: the cluster is one that was made for the run."""
    pytest.importorskip("ray")
    assert listening_of(tmp_path, ("ray", *FIT, "--workers=2")) == set()


class Keeps(BoringModel):
    """Has a secret among its arguments, and what only looks like one."""

    def __init__(self, api_key="", start_token="", servers=(), size=3):
        super().__init__()
        self.save_hyperparameters()
        self.size = size


def test_secrets_that_a_module_keeps_are_not_in_its_checkpoints(tmp_path, caplog):
    module = Keeps("sesame", "<s>", ("https://me:p@ssw0rd@host/x", "plain"), 5)
    short = {"max_steps": 1, "enable_progress_bar": False, "accelerator": "cpu", "devices": 1, "limit_val_batches": 0}
    trainer = Trainer(default_root_dir=tmp_path, logger=False, **short)
    trainer.fit(module)
    trainer.save_checkpoint(file := tmp_path / "again.ckpt")
    for path in tmp_path.rglob("*.ckpt"):
        assert not any(secret in path.read_bytes() for secret in (b"sesame", b"ssw0rd"))
    assert module.hparams.api_key == "sesame"
    read = Keeps.load_from_checkpoint(file)
    assert (read.hparams.api_key, read.hparams.start_token, read.size) == ("(secret)", "<s>", 5)
    assert read.hparams.servers == ("https://host/x", "plain")
    assert Keeps.load_from_checkpoint(file, api_key="sesame").hparams.api_key == "sesame"
    assert sum("save_hyperparameters keeps as api_key, servers" in record.getMessage() for record in caplog.records) == 1


def test_secrets_are_in_config_yaml_alone_which_its_owner_can_read(quick, tmp_path):
    keyed = {"api_key": "sesame", "address": "https://me:p@ssw0rd@host/x?token=abcdef&a=1", "pad_token": "visible"}
    words = "--trainer.callbacks=" + json.dumps([{"class_path": "tests.strangers.Keyed", "init_args": keyed}])
    run = quick(*FIT, words)
    assert run.code == 0, run.output
    folder = tmp_path / "lightning_logs/it"
    assert quick("export", "--run=it", "--to=safetensors").code == 0
    resumed = quick("fit", "--run=it", "--trainer.max_steps=9")
    assert resumed.code == 0, resumed.output
    assert "has changed" not in resumed.output
    holding = {
        str(file.relative_to(tmp_path)): secret
        for file in tmp_path.rglob("*")
        if file.is_file()
        for secret in (b"sesame", b"ssw0rd", b"abcdef")
        if secret in file.read_bytes()
    }
    assert holding.keys() == {"lightning_logs/it/config.yaml"}
    assert stat.S_IMODE((folder / "config.yaml").stat().st_mode) == 0o600
    assert "visible" in (folder / "report.html").read_text()


def test_a_command_is_written_down_without_its_secrets():
    callback = '{"class_path": "a.B", "init_args": {"api_key": "sesame", "size": 3}}'
    words = [
        "fit",
        "--model.api_key=sesame",
        "--password",
        "sesame",
        "--pad_token",
        "visible",
        f"--trainer.callbacks={callback}",
    ]
    words += ["--data.address", "https://me:sesame@host/x", f"[{callback}]", "{sesame: [", "--trainer.max_epochs", "3"]
    masked = shlex.split(masked_command(words))
    assert "sesame" not in " ".join(masked)
    assert masked[:7] == ["fit", "--model.api_key=(secret)", "--password", "(secret)", "--pad_token", "visible", masked[6]]
    assert json.loads(masked[6].partition("=")[2])["init_args"] == {"api_key": "(secret)", "size": 3}
    assert masked[-4:] == [masked[-4], "(secret)", "--trainer.max_epochs", "3"]


def test_a_config_that_others_can_write_is_warned_of_before_it_is_read(quick, tmp_path):
    config = tmp_path / "lightning_logs/it/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("trainer: 3")
    for mode, owner, warns in (
        (0o644, os.geteuid(), ""),
        (0o646, os.geteuid(), "can be written by everybody"),
        (0o644, 12345, "12345"),
    ):
        if owner != os.geteuid() and os.geteuid():
            continue  # nobody else can give a file away
        config.chmod(mode)
        os.chown(config, owner, -1)
        run = quick("test", "--run=it")
        assert run.code == 2
        lines = [line for line in run.output.splitlines() if "imported and called" in line]
        assert len(lines) == bool(warns)
        assert warns in "".join(lines)
