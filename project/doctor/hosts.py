"""The doctor's checks of hosts: versions, hardware, the run's folder, limits, clocks."""

import statistics
import time

import torch
import torch.distributed as dist

from project.cluster import environment, gpu, shared_folder
from project.cluster.cores import cores
from project.cluster.place import MORE_SHARED_MEMORY
from project.doctor.findings import Examination, Finding, Trouble, in_bytes

_SKEW = 1.0  # seconds between two clocks
_FEW_FILES = 1024


def versions(this: Examination) -> None:
    odd = environment.compare(this.run.environment, this.run.configuration, this.hosts, this.gather)
    here = this.run.environment
    names = ("Python", "torch", "lightning", "CUDA", "commit", "image")
    shown = ", ".join(f"{name} {here[name]}" for name in names if here[name] != "none")
    fix = "Install the same versions everywhere (scripts/setup), and start every rank with the same words."
    troubles = [Trouble(text, ranks) for text, ranks in odd.items()]
    this.add("versions", troubles, shown, fix, environments=this.gather(here))


def hardware(this: Examination) -> None:
    odd = environment.different(this.gather(this.run.environment), this.hosts, environment.ALIKE)
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
        return
    reports = dict(enumerate(this.gather(_health(this.run.device))))
    known = {rank: health for rank, health in reports.items() if isinstance(health, gpu.Health)}
    if not known:
        this.findings.append(Finding("GPUs", "skipped", f"not looked at: {reports[0]}", gpu.EXTRA))
        return
    troubles = [this.trouble([rank], f"not looked at: {why}", bad=False) for rank, why in reports.items() if rank not in known]
    for rank, health in known.items():
        troubles += [this.trouble([rank], text) for text in health.unfit]
        troubles += [this.trouble([rank], text, bad=False) for text in health.slow]
    first = next(iter(known.values())).figures
    shown = ", ".join(f"{name} {value:g}" for name, value in first.items() if not isinstance(value, str))
    fix = "Leave out a GPU with errors, or reset it (nvidia-smi -r); see cooling, power and nvidia-smi -q, and dmesg for Xid."
    this.add("GPUs", troubles, f"fit; the first: {shown}", fix, gpus={rank: known[rank].figures for rank in known})


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
        problem, fix = None if run.may_move else shared_folder.moved(*place), shared_folder.MOVE
        good = "only rank 0's host needs it (trainer.shared_folder=false)"
    this.add("run's folder", [Trouble(*problem)] if problem else [], f"{run.folder}: {good}", fix)


def limits(this: Examination) -> None:
    run = this.run
    reports = this.gather(environment.limits(run.folder))
    problems: list[tuple[Trouble, str]] = []
    need, free = run.disk_needed, reports[0]["disk"]
    if free is not None and free < need:
        text = f"{in_bytes(free)} of disk are left for {run.checkpoints + 1} checkpoints of {in_bytes(run.checkpoint_bytes)}"
        problems.append((this.trouble([0], text), "Free disk, or keep fewer checkpoints."))
    few = [rank for rank, report in enumerate(reports) if (report["open files"] or 0) < _FEW_FILES + 4 * run.world_size]
    if few:
        text = f"at most {reports[few[0]]['open files']} open files"
        problems.append((this.trouble(few, text, bad=False), "ulimit -n 65536."))
    batches = run.shared_memory_needed(this.sample_bytes)
    small = [rank for rank, report in enumerate(reports) if (size := report["/dev/shm"]) is not None and size < batches]
    if small:
        text = f"{in_bytes(reports[small[0]]['/dev/shm'] or 0)} of /dev/shm, and the loaders' workers take {in_bytes(batches)}"
        problems.append((this.trouble(small, text), f"/dev/shm: {MORE_SHARED_MEMORY}"))
    crowded = this.gather((run.workers + 1) * run.processes > cores(1) and run.workers > 0)
    if any(crowded):
        text = f"{run.processes} process(es) with {run.workers} workers each on {cores(1)} core(s)"
        ranks = [rank for rank, is_crowded in enumerate(crowded) if is_crowded]
        problems.append((this.trouble(ranks, text, bad=False), "data.num_workers=auto."))
    good = f"{in_bytes(free)} of disk for {in_bytes(need)} of checkpoints" if free is not None else "the disk is not there yet"
    troubles, fixes = [trouble for trouble, _ in problems], " ".join(fix for _, fix in problems)
    this.add("limits", troubles, good, fixes, limits=reports)


def clocks(this: Examination) -> None:
    if this.control is None:
        this.add("clocks", [], "one process")
        return
    this.gather(None)
    dist.barrier(group=this.control)
    times = this.gather(time.time())
    median = statistics.median_low(times)
    ahead = {rank: at - median for rank, at in enumerate(times)}
    troubles = [
        this.trouble([rank], f"its clock is {seconds:+.1f} s off", bad=False)
        for rank, seconds in ahead.items()
        if abs(seconds) > _SKEW
    ]
    spread = max(0.001, max(times) - min(times))
    this.add("clocks", troubles, f"agree to {spread:.3f} s", "Let NTP (chrony) set the clocks.", times=times)
