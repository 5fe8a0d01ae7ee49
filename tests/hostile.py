"""Run folders that somebody has made hostile: each is a copy of a real run, in which one thing is damaged or planted.

`cases()` lists them; `harm` does to a folder what one says. `drive` runs verbs over folders, each in a forked process.
"""

import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SECRET = "what-lies-outside-3141592653"
LIMIT, PATIENCE = 10, 120
"""Seconds of a processor that a verb may take, and seconds on a busy machine."""

FILES = (
    "life.jsonl",
    "config.yaml",
    "log.txt",
    "fingerprints.jsonl",
    "events",
    "manifest",
    "checkpoint",
    "checkpoints",
    "profiles",
)
"""What a verb reads in a run's folder."""
ALSO = ("profile.json", "loggers.json", "metrics.csv", ".lock", "summary.json", "report.html", ".rank-0")
"""What else is read, or only written."""
VALUES: list[Any] = [
    *(float("nan"), float("inf"), -1, 10**30, 0, True, None, [], {}, [[]], "text", "", "../../other", "\ud800", "x" * 5_000),
    "\x1b]0;owned\x07\x1b[2J[red]x[/red]\u202e<script>alert(1)</script>",
]
_KEPT = ("class_path", "devices")


def _random(path: Path, chance: random.Random, outside: Path) -> None:
    path.write_bytes(chance.randbytes(3_000))


def _outside(path: Path, chance: random.Random, outside: Path) -> None:
    path.symlink_to(outside / "secret.txt")


def _sparse(path: Path, chance: random.Random, outside: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50_000_000)


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


WAYS: dict[str, Callable[[Path, random.Random, Path], object]] = {
    "random bytes": _random,
    "two bytes 0xff": lambda path, chance, outside: path.write_bytes(b"\xff\xff"),
    "an empty file": lambda path, chance, outside: path.write_bytes(b""),
    "a pipe": lambda path, chance, outside: os.mkfifo(path),
    "a link to /dev/zero": lambda path, chance, outside: path.symlink_to("/dev/zero"),
    "a link to a file outside": _outside,
    "a link to a folder outside": lambda path, chance, outside: path.symlink_to(outside),
    "a link to itself": lambda path, chance, outside: path.symlink_to(path.name),
    "a folder": lambda path, chance, outside: path.mkdir(),
    "50 MB of nothing": _sparse,
    "2,000 brackets": lambda path, chance, outside: path.write_text("[" * 2_000 + "]" * 2_000 + "\n"),
    "lines of nothing": lambda path, chance, outside: path.write_bytes(b"\n" * 3_000_000),
}


class Case(NamedTuple):
    """What is done to a folder: the file, the way, and the seed of what is left to chance."""

    file: str
    way: str
    seed: int

    def __str__(self) -> str:
        return f"{self.file}: {self.way} ({self.seed})"


def cases(count: int) -> list[Case]:
    """So many, of each kind some."""
    some = ("random bytes", "a pipe", "a link to /dev/zero", "a link to a file outside", "a folder")
    chosen = [Case(file, way, 0) for files, ways in ((FILES, WAYS), (ALSO, some)) for file in files for way in ways]
    values = (
        "life.jsonl",
        "fingerprints.jsonl",
        "manifest",
        "config.yaml",
        "profile.json",
        "loggers.json",
        "events",
        "checkpoint",
    )
    seed = 1
    while len(chosen) < max(count, 200):
        chosen += [Case(file, "another value", seed) for file in values] + [Case(file, "cut", seed) for file in FILES[:7]]
        seed += 1
    random.Random(0).shuffle(chosen)
    return chosen[:count]


def harm(folder: Path, case: Case, outside: Path) -> None:
    """Does it; the folder is a run's."""
    chance = random.Random(str(case))
    if (folder / "checkpoints").is_symlink():  # of an earlier case: what follows stays in the folder
        (folder / "checkpoints").unlink()
    path = _path(folder, case.file)
    content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if case.way == "another value":
        _CHANGED.get(case.file, _changed_lines)(path, content, chance)
    elif case.way == "cut":
        path.write_bytes(_cut(content, chance))
    else:
        WAYS[case.way](path, chance, outside)
    if path.is_symlink() and not os.geteuid():
        os.lchown(path, 12345, -1)  # somebody else's


def _path(folder: Path, file: str) -> Path:
    if file == "events":
        return min(folder.glob("events.*"), default=folder / "events.out.tfevents.1.h.1.0")
    if file in ("manifest", "checkpoint"):
        suffix = ".json" if file == "manifest" else ".ckpt"
        return max(folder.glob(f"checkpoints/step-*{suffix}"), default=folder / f"checkpoints/step-000000004{suffix}")
    return folder / file


# Values where others belong -------------------------------------------------------------------------------------------


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All containers of a document, each with a key of it."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def _change(document: Any, chance: random.Random) -> None:
    places = [place for place in _places(document) if place[1] not in _KEPT]
    if places:
        container, key = chance.choice(places)
        container[key] = chance.choice(VALUES)


def _changed_lines(path: Path, content: bytes, chance: random.Random) -> None:
    """Of JSON: a document in one line or in several, or a document in each line."""
    try:
        documents, lines = [json.loads(content)], False
    except ValueError:
        documents, lines = [json.loads(line) for line in content.splitlines()], True
    for document in chance.sample(documents, min(2, len(documents))):
        _change(document, chance)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents) if lines else json.dumps(documents[0]))


def _changed_yaml(path: Path, content: bytes, chance: random.Random) -> None:
    import yaml

    document = yaml.safe_load(content)
    _change(document, chance)
    path.write_text(yaml.safe_dump(document))


def _changed_request(path: Path, content: bytes, chance: random.Random) -> None:
    request = {"steps": 1, "ranks": [0], "memory": False}
    request[chance.choice(list(request))] = chance.choice(VALUES)
    path.write_text(json.dumps(request))


def _identified(path: Path, content: bytes, chance: random.Random) -> None:
    path.write_text(json.dumps({"W&B": chance.choice(VALUES), "MLflow mlruns": chance.choice(VALUES)}))


def framed(record: bytes, length: int | None = None) -> bytes:
    """A record as event files have it; `length`: what it claims to have."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    head = struct.pack("<Q", len(record) if length is None else length)
    return head + struct.pack("<I", masked_crc32c(head)) + record + struct.pack("<I", masked_crc32c(record))


def _odd_events(path: Path, content: bytes, chance: random.Random) -> None:
    """Records that are whole, and say what can't be."""
    from tensorboard.compat.proto.event_pb2 import Event

    records = [framed(b"\xff" * 30), framed(b"x" * 50, chance.choice([1 << 62, 1 << 40, 1 << 24]))]
    for number in range(30):
        event = Event(
            step=chance.choice([-1, 0, 1, 1 << 62, -(1 << 62)]), wall_time=chance.choice([number, -1e300, 1e300, float("nan")])
        )
        tag = chance.choice(["train/loss", "ranks/data_ms/x", "speed/rest", "run/\x1b[2J<script>", "a/b/c", "", "val/loss"])
        event.summary.value.add(tag=tag, simple_value=chance.choice([0.0, -1e38, 1e38, float("nan"), float("inf")]))
        records.append(framed(event.SerializeToString()))
    records.append(framed(Event(file_version="brain.Event:x", wall_time=1).SerializeToString()))
    chance.shuffle(records)
    path.write_bytes(content + b"".join(records))


def _odd_checkpoint(path: Path, content: bytes, chance: random.Random) -> None:
    """A file of torch.save with another structure, and a manifest that fits it."""
    import torch

    checkpoint = torch.load(io.BytesIO(content), weights_only=True)
    places = [(checkpoint, key) for key in checkpoint] + [
        place for key in ("position", "loops") for place in _places(checkpoint[key])
    ]
    container, key = chance.choice(places)
    if chance.random() < 0.3:
        del container[key]
    else:
        container[key] = chance.choice([value for value in VALUES if value != "\ud800"])
    torch.save(chance.choice([checkpoint, checkpoint, checkpoint, [1], "text"]), path)
    manifest = json.loads(path.with_suffix(".json").read_text())
    written = path.read_bytes()
    manifest |= {"bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}
    path.with_suffix(".json").write_text(json.dumps(manifest))


_CHANGED: dict[str, Callable[[Path, bytes, random.Random], None]] = {
    **{"config.yaml": _changed_yaml, "profile.json": _changed_request, "loggers.json": _identified, "events": _odd_events},
    "checkpoint": _odd_checkpoint,
}


# Verbs ----------------------------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a verb has ended: the folder's case, the words, the exit code (of a signal: minus its number), what it printed."""

    case: str
    words: tuple[str, ...]
    code: int
    output: str
    seconds: float


def drive(jobs: Sequence[tuple[str, Path, tuple[str, ...]]], results: Path) -> None:
    """Runs `python -m project WORDS` for each job (a case, a folder to be in, the words), one after the other."""
    import tensorboard.backend.event_processing.event_accumulator  # noqa: F401  # once, and not in each process

    for case, folder, words in jobs:
        for path in (folder / "lightning_logs/it").rglob("*"):
            os.utime(path, (1e9, 1e9), follow_symlinks=False)  # nobody is at it
        output, began = folder / "output.txt", time.monotonic()
        child = os.fork()
        if child == 0:
            _be(folder, words, output)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ended = Ended(case, words, code, output.read_text(errors="replace"), time.monotonic() - began)
        with results.open("a") as file:
            file.write(json.dumps(ended) + "\n")


def _be(folder: Path, words: tuple[str, ...], output: Path) -> None:
    """Becomes the program; does not come back."""
    import traceback

    from project.__main__ import _READERS

    code: Any = 1
    try:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + LIMIT,) * 2)
        sys.argv = ["project", *words]
        if words[0] in _READERS:
            from importlib import import_module

            from project.cli.reading import ended

            code = ended(lambda: import_module(_READERS[words[0]]).main(list(words[1:])))
        elif words[0] == "prove":
            from project.cli import prove

            code = prove.main(list(words[1:]))
        else:
            from project.cli.main import main

            main()
            code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 1)
