"""Who can do what to a run: docs/trust.md has a line for each of these tests."""

import json
import pickle
import stat
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from project.cluster.agent_store import guard
from tests.conftest import ROOT, TINY, environment, program
from tests.strangers import on_loopback

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
    lines = (folder / "listeners.txt").read_text().splitlines()
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
    done = subprocess.run(script, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert exposed(tmp_path) == []


def test_a_stranger_who_sends_to_every_port_changes_nothing(quick, tmp_path):
    """Datagrams that once ended a rank, and connections that say nothing which makes sense."""
    for name, sends in (("quiet", 0), ("busy", 100)):
        run = quick(*FIT[:-1], f"--run={name}", stranger(sends=sends), ranks=2)
        assert run.code == 0, run.output
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


def test_secrets_are_in_config_yaml_alone_which_its_owner_can_read(quick, tmp_path):
    keyed = {"api_key": "sesame", "address": "https://me:p@ssw0rd@host/x?token=abcdef&a=1", "pad_token": "visible"}
    words = "--trainer.callbacks=" + json.dumps([{"class_path": "tests.strangers.Keyed", "init_args": keyed}])
    run = quick(*FIT, words)
    assert run.code == 0, run.output
    folder = tmp_path / "lightning_logs/it"
    assert quick("export", "--run=it", "--to=safetensors").code == 0
    again = quick("fit", "--run=it", "--trainer.max_steps=9")
    assert again.code == 0, again.output
    assert "has changed" not in again.output
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
