"""Serves a run's figures to Prometheus and those like it: speed, loss, shares of a step, ranks, starts, and the host's GPUs.

By a switch (`metrics.port`), on the loopback address alone: what collects figures on a host reads them there, and nobody else.
"""

import logging
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from project.cluster.gpu import NoLibrary, Telemetry
from project.cluster.place import host
from project.errors import UserError
from project.step.measurements import TakesMeasurements
from project.step.position import planned_steps
from project.typed import typed
from project.watch.history import FILE, PHASES, lives_of

log = logging.getLogger(__name__)

KIND = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_LOCAL = ("127.0.0.1", "localhost", "")
_PATIENCE = 5.0  # seconds that a reader has for its question
_TAGS = 1000  # values of a module: a name of its own for each step would fill the memory
_NAME = re.compile(r"[a-z][a-z0-9_]{0,60}")
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_COUNTERS = ("ecc_corrected_errors", "ecc_uncorrected_errors", "nvlink_errors")


class Sample(NamedTuple):
    """A value of a metric."""

    name: str
    labels: Mapping[str, str]
    value: float
    counter: bool = False


class Latest(TakesMeasurements, DummyLogger):
    """A logger that keeps the newest value of each curve, and writes nothing."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self.values: dict[str, float] = {}

    @property
    def save_dir(self) -> str:
        return self._folder

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for tag, value in metrics.items():
            if tag in self.values or len(self.values) < _TAGS:
                self.values[tag] = float(value)


class Metrics(Callback):
    """Answers `GET /metrics` on the loopback address of each host: the run's figures on rank 0's, its GPUs' on all.

    Args:
        port: the port, for example 9400; 0 takes a free one, and null serves nothing.
    """

    def __init__(self, port: int | None = None) -> None:
        if port is not None and not 0 <= port < 65536:
            raise UserError(f"metrics.port is a number from 0 to 65535, and not {port}.")
        self.port = port
        self._server: HTTPServer | None = None
        self._latest: Latest | None = None
        self._trainer: Trainer | None = None
        self._gpus: dict[int, Telemetry] = {}
        self._labels: Mapping[str, str] = {}
        self._facts: dict[str, float] = {}

    def __reduce__(self) -> tuple[type["Metrics"], tuple[int | None]]:
        """Pickles the arguments only: the server belongs to this one."""
        return type(self), (self.port,)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.port is None or stage != "fit" or trainer.local_rank != 0 or self._server is not None:
            return
        self._labels = {"run": Path(trainer.default_root_dir).name, "host": host()}
        if trainer.is_global_zero:
            self._latest = Latest(trainer.default_root_dir)
            trainer.loggers = [*trainer.loggers, self._latest]
        if torch.cuda.is_available():
            try:
                self._gpus = {number: Telemetry(torch.device("cuda", number)) for number in range(torch.cuda.device_count())}
            except NoLibrary as error:
                log.info("No figures of GPUs: %s", error)
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        except OSError as error:
            log.warning("metrics.port %d can't be served: %s. Training continues. HINT: another port, or 0.", self.port, error)
            return
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        log.info("Metrics: http://127.0.0.1:%d/metrics", self._server.server_port)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._latest is None:
            return
        self._facts = {"ranks": trainer.world_size, "starts": len(lives_of(Path(trainer.default_root_dir) / FILE)) or 1}
        self._facts |= {"steps_planned": planned} if (planned := planned_steps(trainer)) else {}
        self._facts |= {"global_batch": batch} if (batch := typed(trainer).global_batch) else {}
        self._trainer = trainer

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        server, self._server, self._trainer = self._server, None, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def samples(self) -> Iterator[Sample]:
        """Yields the samples known now."""
        yield Sample("samerun_info", self._labels, 1)
        if self._latest is not None and self._trainer is not None:
            now = {"step": self._trainer.global_step, "epoch": self._trainer.current_epoch}
            facts = {f"samerun_{name}": value for name, value in {**self._facts, **now}.items()}
            for name, value in facts.items():
                yield Sample(name, self._labels, value)
            yield from self.of_curves(dict(self._latest.values), {"samerun_info", *facts})
        for number, gpu in self._gpus.items():
            labels = {**self._labels, "gpu": str(number)}
            for name, value in gpu.read().items():
                yield Sample(f"samerun_gpu_{name}", labels, value, counter=name in _COUNTERS)
            for xid, count in gpu.xids().items():
                yield Sample("samerun_gpu_xid_errors", {**labels, "xid": str(xid)}, count, counter=True)

    def of_curves(self, values: Mapping[str, float], taken: Collection[str]) -> Iterator[Sample]:
        """Yields the curves' newest values: the project's under names of their own, unless these are taken."""
        for tag, value in values.items():
            sample = self._of_curve(tag, value)
            if sample.name in taken:
                sample = Sample("samerun_logged", {**self._labels, "name": tag}, value)
            yield sample

    def _of_curve(self, tag: str, value: float) -> Sample:
        room, _, name = tag.partition("/")
        if room == "speed" and name in PHASES:
            return Sample("samerun_step_share", {**self._labels, "phase": name}, value)
        if room in ("speed", "run") and _NAME.fullmatch(name):
            return Sample(f"samerun_{name}", self._labels, value)
        work, _, place = name.partition("/")
        if room == "ranks" and _NAME.fullmatch(work):
            rank, _, where = place.partition(".")
            return Sample(f"samerun_rank_{work}", {**self._labels, "rank": rank, "rank_host": where}, value)
        return Sample("samerun_logged", {**self._labels, "name": tag}, value)


def rendered(samples: Iterable[Sample]) -> str:
    """Returns the text of an answer, in the OpenMetrics format."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.name, []).append(sample)
    lines = []
    for name, family in families.items():
        lines.append(f"# TYPE {name} {'counter' if family[0].counter else 'gauge'}")
        for sample in family:
            labels = ",".join(f'{label}="{text.translate(_ESCAPED)}"' for label, text in sample.labels.items())
            lines.append(f"{name}{'_total' if sample.counter else ''}{{{labels}}} {sample.value:.10g}")
    return "\n".join([*lines, "# EOF", ""])


def _handler(metrics: Metrics) -> type[BaseHTTPRequestHandler]:
    """Returns the class that answers questions, which the server makes an object of for each."""

    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE
        server_version, sys_version = "samerun", ""

        def do_GET(self) -> None:
            # A page in somebody's browser may have given this address a name of its own.
            if self.headers.get("Host", "").rpartition(":")[0] not in _LOCAL or self.path.partition("?")[0] != "/metrics":
                return self.send_error(404)
            body = rendered(metrics.samples()).encode()
            self.send_response(200)
            self.send_header("Content-Type", KIND)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return None

        def log_message(self, format: str, *args: object) -> None:
            """Writes nothing: a question every few seconds is not for the log."""

    return Handler
