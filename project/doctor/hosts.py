"""The doctor's checks of hosts: versions, hardware, the run's folder, limits, clocks."""

import statistics
import time

import torch
import torch.distributed as dist

from project.cluster import environment, gpu, shared_folder
from project.cluster.cores import cores
from project.cluster.environment import named
from project.cluster.place import MORE_SHARED_MEMORY
from project.doctor.examination import Examination
from project.doctor.findings import Finding, Trouble, in_bytes

_SKEW = 1.0  # seconds between two clocks
_FEW_FILES = 1024


def versions(this: Examination) -> None:
    all_of_them = this.gather(this.run.environment)
    odd = environment.compare(this.run.environment, this.run.configuration, this.hosts, this.gather)
    here = this.run.environment
    shown = ", ".join(
        f"{name} {here[name]}" for name in ("Python", "torch", "lightning", "CUDA", "commit", "image") if here[name] != "none"
    )
    fix = "Install the same versions everywhere (scripts/setup), and start every rank with the same words."
    this.add("versions", [Trouble(text, ranks) for text, ranks in odd.items()], shown, fix, environments=all_of_them)


def hardware(this: Examination) -> None:
    all_of_them = this.gather(this.run.environment)
    odd = environment.different(all_of_them, this.hosts, environment.ALIKE)
    here = this.run.environment
    kind = f"{here['CPU']}, {here['cores']} core(s)"
    if here["devices"]:
        kind = f"{here['devices']} x {here['device']}, {here['memory']}, driver {here['driver']}"
    shown = f"{len(set(this.hosts))} host(s), each {kind}"
    fix = "The fastest wait for the slowest: use one kind of machine, or expect the pace of the slowest."
    this.add("hardware", [Trouble(text, ranks, bad=False) for text, ranks in odd.items()], shown, fix)


def gpus(this: Examination) -> None:
    """Checks what NVIDIA's library reports of each rank's GPU. It knows no Xid that came before: those are in dmesg."""
    if this.run.device.type != "cuda":
        return None
    all_of_them = this.gather(_health(this.run.device))
    known = {rank: health for rank, health in enumerate(all_of_them) if isinstance(health, gpu.Health)}
    unknown = {rank: health for rank, health in enumerate(all_of_them) if isinstance(health, str)}
    if not known:
        return this.findings.append(Finding("GPUs", "skipped", f"not looked at: {unknown[0]}", gpu.EXTRA))
    troubles = [Trouble(f"{named([rank], this.hosts)}: not looked at: {why}", [rank], False) for rank, why in unknown.items()]
    for rank, health in known.items():
        troubles += [Trouble(f"{named([rank], this.hosts)}: {text}", [rank]) for text in health.unfit]
        troubles += [Trouble(f"{named([rank], this.hosts)}: {text}", [rank], bad=False) for text in health.slow]
    first = next(iter(known.values()))
    shown = ", ".join(f"{name} {value:g}" for name, value in first.figures.items() if not isinstance(value, str))
    fix = "Leave out a GPU with errors, or reset it (nvidia-smi -r); see cooling, power and nvidia-smi -q, and dmesg for Xid."
    return this.add(
        "GPUs", troubles, f"fit; the first: {shown}", fix, gpus={rank: health.figures for rank, health in known.items()}
    )


def _health(device: torch.device) -> gpu.Health | str:
    try:
        return gpu.health(gpu.Nvml(device))
    except gpu.NoLibrary as reason:
        return str(reason)


def run_folder(this: Examination) -> None:
    run = this.run
    place = run.folder, run.rank, this.hosts, this.gather
    if run.shared:
        problem, good, fix = shared_folder.folder_problem(*place), "written on one, read on all", shared_folder.SHARE
    else:
        problem, fix = shared_folder.moved(*place), shared_folder.MOVE
        good = "only rank 0's host needs it (trainer.shared_folder=false)"
    this.add("run's folder", [Trouble(*problem)] if problem else [], f"{run.folder}: {good}", fix)


def limits(this: Examination) -> None:
    run = this.run
    all_limits = this.gather(environment.limits(run.folder))
    troubles, fixes = [], []
    need = run.disk_needed
    free = all_limits[0]["disk"]
    if free is not None and free < need:
        kept = f"{run.checkpoints + 1} checkpoints of {in_bytes(run.checkpoint_bytes)}"
        troubles.append(Trouble(f"{named([0], this.hosts)}: {in_bytes(free)} of disk are left for {kept}", [0]))
        fixes.append("Free disk, or keep fewer checkpoints.")
    few = [rank for rank, rank_limits in enumerate(all_limits) if rank_limits["open files"] < _FEW_FILES + 4 * run.world_size]
    if few:
        number = all_limits[few[0]]["open files"]
        troubles.append(Trouble(f"{named(few, this.hosts)}: at most {number} open files", few, bad=False))
        fixes.append("ulimit -n 65536.")
    batches = run.shared_memory_needed(this.sample_bytes)
    small = [
        rank
        for rank, rank_limits in enumerate(all_limits)
        if rank_limits["/dev/shm"] is not None and rank_limits["/dev/shm"] < batches
    ]
    if small:
        text = f"{in_bytes(all_limits[small[0]]['/dev/shm'])} of /dev/shm, and the loaders' workers take {in_bytes(batches)}"
        troubles.append(Trouble(f"{named(small, this.hosts)}: {text}", small))
        fixes.append(f"/dev/shm: {MORE_SHARED_MEMORY}")
    loaded = this.gather((run.workers + 1) * run.processes > cores(1) and run.workers > 0)
    over = [rank for rank, too_many in enumerate(loaded) if too_many]
    if over:
        text = f"{run.processes} process(es) with {run.workers} workers each on {cores(1)} core(s)"
        troubles.append(Trouble(f"{named(over, this.hosts)}: {text}", over, bad=False))
        fixes.append("data.num_workers=auto.")
    good = f"{in_bytes(free)} of disk for {in_bytes(need)} of checkpoints" if free is not None else "the disk is not there yet"
    this.add("limits", troubles, good, " ".join(fixes), limits=all_limits)


def clocks(this: Examination) -> None:
    if this.control is None:
        return this.add("clocks", [], "one process")
    this.gather(None)
    dist.barrier(group=this.control)
    times = this.gather(time.time())
    median = statistics.median_low(times)
    off = [rank for rank, at in enumerate(times) if abs(at - median) > _SKEW]
    troubles = [
        Trouble(f"{named([rank], this.hosts)}: its clock is {times[rank] - median:+.1f} s off", [rank], bad=False)
        for rank in off
    ]
    spread = max(times) - min(times)
    this.add("clocks", troubles, f"agree to {max(spread, 0.001):.3f} s", "Let NTP (chrony) set the clocks.", times=times)
    return None
