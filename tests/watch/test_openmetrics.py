"""Figures for Prometheus: a scrape in the middle of a fit, and what is asked of a GPU."""

import json
import re
import socket
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
import torch

from project.cluster.gpu import Telemetry
from project.errors import UserError
from project.launch.early_start import free_port
from project.watch.openmetrics import KIND, Metrics, Sample, rendered
from tests.conftest import ROOT, TINY

LINE = re.compile(r"(?P<name>[a-z_]+)\{(?P<labels>(?:[a-z_]+=\"(?:[^\"\\\n]|\\.)*\",?)*)\} (?P<value>[-+0-9.einfa]+)")


def scraped(text: str) -> dict[str, float]:
    """The samples of an answer, by name and labels; each line is one, or says a type."""
    *lines, end, last = text.split("\n")
    assert (end, last) == ("# EOF", "")
    samples = [LINE.fullmatch(line) for line in lines if not line.startswith("# TYPE ")]
    assert all(samples), text
    values = {f"{sample['name']}{{{sample['labels']}}}": float(sample["value"]) for sample in samples if sample}
    assert len(values) == len(samples), "a sample is there twice"
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(typed) == len(set(typed))
    return values


def test_a_scrape_during_a_fit(quick, tmp_path):
    port = free_port()
    scrape = [{"class_path": "tests.watch.plugged.Scrape", "init_args": {"port": port, "step": 12}}]
    run = quick(
        *("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_epochs=4", "--data.global_batch_size=64", "--run=it"),
        *(f"--metrics.port={port}", f"--trainer.callbacks={json.dumps(scrape)}"),
        ranks=2,
    )
    assert run.code == 0, run.output
    assert f"Metrics: http://127.0.0.1:{port}/metrics" in run.output
    kind, _, text = (tmp_path / "scraped").read_text().partition("\n")
    assert kind == KIND
    values = scraped(text)
    by_name = {name.partition("{")[0]: value for name, value in values.items()}
    assert by_name["samerun_ranks"] == 2
    assert by_name["samerun_starts"] == 1
    assert by_name["samerun_step"] == 12
    assert by_name["samerun_steps_planned"] == 16
    assert by_name["samerun_samples_per_s"] > 0
    (loss,) = [value for name, value in values.items() if 'name="train/loss"' in name]
    assert loss in [pytest.approx(value, rel=1e-6) for value in run.curve("train/loss").values()]
    shares = [value for name, value in values.items() if name.startswith("samerun_step_share{") and 'phase="' in name]
    assert sum(shares) == pytest.approx(1, abs=0.01)
    with pytest.raises(OSError, match="refused"):  # it ends with the run
        socket.create_connection(("127.0.0.1", port), timeout=5)

    # What the dashboard shows is there, but for a GPU's.
    shown = set(re.findall(r"samerun_[a-z_]+", (ROOT / "docs/grafana.json").read_text()))
    assert {name for name in shown if not name.startswith("samerun_gpu_")} <= by_name.keys()


def test_a_port_in_use_does_not_stop_a_fit(quick):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = quick("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_steps=1", f"--metrics.port={port}", "--run=it")
    assert run.code == 0, run.output
    assert f"metrics.port {port} can't be served" in run.output


@pytest.fixture
def served():
    """Metrics of no run, which answer."""
    metrics = Metrics(0)
    trainer = SimpleNamespace(local_rank=0, is_global_zero=False, default_root_dir='a "run"')
    metrics.setup(trainer, None, "fit")
    yield metrics, metrics._server.server_port
    metrics.teardown(trainer, None, "fit")


def test_only_who_names_the_loopback_address_is_answered(served):
    metrics, port = served
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert r'run="a \"run\""' in answer.read().decode()
    assert metrics._server.server_address[0] == "127.0.0.1"
    for path, host in (("metrics", "rebound.example:80"), ("etc/passwd", "127.0.0.1:80")):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", headers={"Host": host})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(request)


def test_a_curve_of_the_module_takes_no_name_of_ours(served):
    metrics, _ = served
    values = {"run/step": 7.0, "run/Ünfit name": 8.0, 'val/"acc"\n': 0.5, "ranks/data_ms/1.h2": 2.0, "speed/forward": 0.3}
    text = rendered(metrics.of_curves(values, {"samerun_step"}))
    assert set(scraped(text).values()) == set(values.values())
    assert re.findall(r"^samerun_step\{", text, re.MULTILINE) == []
    assert r'name="val/\"acc\"\n"' in text
    assert 'samerun_rank_data_ms{run="a \\"run\\"",host=' in text


def test_a_wrong_port_is_refused():
    with pytest.raises(UserError, match=r"metrics\.port is a number"):
        Metrics(70000)


class Driver:
    """A GPU as nvidia-ml-py describes it, whose driver knows no remapped rows and reports two errors."""

    class NVMLError(Exception):
        pass

    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.events = [79, 79, 13]

    def __getattr__(self, name):
        known = {
            "nvmlInit": None, "nvmlDeviceGetHandleByUUID": "handle", "nvmlDeviceGetPowerUsage": 350_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000, "nvmlDeviceGetClockInfo": 1980, "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97), "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=1 << 33),
            "nvmlDeviceGetTotalEccErrors": 3, "nvmlEventSetCreate": "set", "nvmlDeviceRegisterEvents": None,
        }  # fmt: skip
        if name == "nvmlDeviceGetNvLinkState":
            return self.link
        if name not in known:
            raise AttributeError(name)
        return lambda *args: known[name]

    def link(self, handle, number):
        if number >= 4:
            raise self.NVMLError("not supported")
        return int(number != 2)

    def nvmlEventSetWait_v2(self, events, timeout):
        assert timeout == 0  # nobody waits
        if not self.events:
            raise self.NVMLError("timeout")
        return SimpleNamespace(eventData=self.events.pop())


def test_a_gpu_is_asked_for_what_it_has(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    gpu = Telemetry(torch.device("cuda", 0))
    assert gpu.read() == {
        "power_watts": 350, "power_limit_watts": 700, "clock_hertz": 1.98e9, "temperature_celsius": 61, "use_ratio": 0.97,
        "memory_used_bytes": 1 << 33, "ecc_corrected_errors": 3, "ecc_uncorrected_errors": 3, "nvlinks": 4, "nvlinks_up": 3,
    }  # fmt: skip
    assert gpu.xids() == {13: 1, 79: 2}
    assert gpu.xids() == {13: 1, 79: 2}
    text = rendered([Sample("samerun_gpu_xid_errors", {"xid": "79"}, 2, counter=True)])
    assert text == '# TYPE samerun_gpu_xid_errors counter\nsamerun_gpu_xid_errors_total{xid="79"} 2\n# EOF\n'
