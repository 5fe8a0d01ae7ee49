"""Makes a process that the fork server has forked a rank: with the configuration that the run began with, and a number."""

import sys
import tempfile
from pathlib import Path
from typing import Protocol, cast

import torchmetrics
from lightning.pytorch.utilities import rank_zero_only

from project.checkpoints.reading import memory_folder
from project.cli.config import Parser
from project.cluster.place import host
from project.config_files import documents, named_configs, setting
from project.launch import early_start
from project.launch.fork_server import serve
from project.launch.launcher import detect
from project.survive.requeue import listen_for_signals
from project.watch.console import open_log


class _Limit(Protocol):
    """A decorator that limits a function to the first rank."""

    rank: int


def fork_ranks() -> None:
    """Serves the supervisor, and returns in each rank that is forked for it, and in each spare."""
    sections = documents(sys.argv)
    strategy, devices, accelerator = (
        setting(sys.argv, sections, "trainer", name) for name in ("strategy", "devices", "accelerator")
    )
    count = early_start.ranks(devices, accelerator, early_start.gpus()) if early_start.starts_ranks(strategy) else 1
    by_engine = detect().kind != "python"
    contents = {path: path.read_bytes() for path in Parser.configs}
    serve(0 if by_engine else count or 1)
    for path, content in contents.items():  # a rank that is started again has the configuration that the run began with
        if not path.exists() or path.read_bytes() != content:
            folder = Path(tempfile.mkdtemp(dir=memory_folder()), path.parent.name)
            folder.mkdir()
            for beside in path.parent.iterdir():  # which it may name
                (folder / beside.name).symlink_to(beside)
            (folder / path.name).unlink(missing_ok=True)
            (folder / path.name).write_bytes(content)
            sys.argv = [str(folder / path.name) if argument == str(path) else argument for argument in sys.argv]
    Parser.configs = named_configs(sys.argv)
    listen_for_signals()
    set_rank()


def set_rank() -> None:
    """Lets libraries and the log know this process's rank."""
    rank = detect().rank
    for limit in cast("tuple[_Limit, ...]", (rank_zero_only, torchmetrics.utilities.prints.rank_zero_only)):
        limit.rank = rank  # which was set when the library was loaded
    open_log(rank, host())
