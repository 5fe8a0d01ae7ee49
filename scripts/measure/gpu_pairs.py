"""Two ranks on the only GPU: two programs, each of which takes itself for a host with one GPU.

python scripts/measure/gpu_pairs.py       one of two ranks, as the environment says: do they meet by NCCL on one GPU?
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TRIAL = 45.0  # seconds for two processes to import torch and to meet
NCCL, GLOO = "nccl", "gloo"
_CHOSEN = "GPU_CHECK_BACKEND"  # what an earlier check has tried

SHARED_BY_GLOO = "--trainer.strategy=" + json.dumps(
    {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"process_group_backend": GLOO}}
)


@dataclass
class Pair:
    """Two programs that have ended: their exit codes by rank, None where one was ended, and what both printed."""

    codes: list[int | None]
    output: str

    @property
    def code(self) -> int:
        return next((1 if code is None else code for code in self.codes if code != 0), 0)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_pair(command: Sequence[str], environment: dict[str, str], limit: float | None = None) -> Pair:
    """Runs a command twice at once, as the first and the second of two hosts."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    path = Path("pair.txt")
    with path.open("w") as file:
        processes = [
            subprocess.Popen(
                command,
                env={**environment, **meeting, "NODE_RANK": str(rank)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for rank in (0, 1)
        ]
    codes: list[int | None] = [None, None]
    with suppress(subprocess.TimeoutExpired):
        for rank, process in enumerate(processes):
            codes[rank] = process.wait(limit)
    for process in processes:
        process.kill()
        process.wait()
    return Pair(codes, path.read_text(errors="replace"))


def shared_backend(environment: dict[str, str]) -> str:
    """Returns 'nccl' where NCCL lets two ranks use one GPU, which depends on its version, and 'gloo' otherwise."""
    if chosen := os.environ.get(_CHOSEN):
        return chosen
    trial = run_pair([sys.executable, __file__], environment, _TRIAL)
    print(f"two ranks on one GPU by NCCL: {trial.codes}\n{trial.output}", flush=True)
    return NCCL if trial.code == 0 else GLOO


def remember(backend: str) -> None:
    """Spares the checks that follow the trial."""
    os.environ[_CHOSEN] = backend


def _meet() -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group(NCCL, rank=int(os.environ["NODE_RANK"]), world_size=2)
    ones = torch.ones(1 << 20, device="cuda")
    for _ in range(3):
        dist.all_reduce(ones)
    met = bool((ones == 8).all())
    dist.destroy_process_group()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(_meet())
