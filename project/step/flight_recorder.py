"""torch's flight recorder: what this process asked NCCL and gloo to do, of late. There is no public way to read it."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

Collective: TypeAlias = dict[str, Any]
"""A collective as torch has recorded it, in JSON."""


def recorded_collectives() -> list[Collective]:
    """Returns the entries of all recorders of this process: gloo's (from torch 2.15 on), NCCL's, and those of nccl2.

    No source file is read and no device is asked: this works in a process in which nothing else does. torch records by
    default (TORCH_FR_BUFFER_SIZE).
    """
    dumps: list[Callable[[], bytes]] = [
        lambda: c10d._dump_fr_trace_json(),
        lambda: c10d._dump_fr_trace_json(backend="nccl2"),
        lambda: c10d._dump_nccl_trace_json(),  # type: ignore[attr-defined]
    ]
    entries: list[Collective] = []
    for dump in dumps:
        with suppress(Exception):  # this torch has no such recorder, or not for this backend
            entries += json.loads(dump()).get("entries", [])
    return entries


def ranks_of(group: str) -> tuple[int, ...]:
    """Returns the ranks of a group of this process, by the name that the recorder gives it; none, if it is gone."""
    with suppress(Exception):
        return tuple(dist.get_process_group_ranks(c10d._resolve_process_group(group)))  # type: ignore[arg-type]
    return ()
