"""torch's flight recorder: what this process asked NCCL and gloo to do, of late. There is no public way to read it."""

import json
from contextlib import suppress
from typing import Any

import torch._C._distributed_c10d as c10d


def record() -> list[dict[str, Any]]:
    """Its entries. It reads no source files and does not ask the device: this works in a process in which nothing else does.

    torch records NCCL's by default (TORCH_FR_BUFFER_SIZE), and from 2.15 on gloo's. Seen at work with gloo alone.
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with suppress(Exception):  # a recorder that is not there, or not for this backend
            entries += json.loads(getattr(c10d, name)()).get("entries", [])
    return entries
