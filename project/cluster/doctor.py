"""Is this cluster fit for this run, and if not, whose fault is it? `python -m project doctor --config ...` asks.

Every check measures on all ranks at once, and rank 0 judges: a row with a verdict, the hosts and ranks it is about, and what
to do. What raises on one rank becomes a finding about that rank; the others don't wait for it.
"""

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from project.cluster import facts, network, shared
from project.cluster.cores import cores
from project.cluster.facts import named
from project.cluster.findings import Finding, Trouble, in_bytes, row
from project.cluster.interfaces import Route, addresses, is_loopback, resolve, source
from project.cluster.meeting import Meeting

log = logging.getLogger(__name__)

_SECONDS = 2.0  # for each of the timings that take as long as one lets them
_SLOW = 1.5  # times the usual: a rank that computes so slowly is named
_SKEW = 1.0  # seconds between two clocks
_SYNC = 0.3  # share of a step: more than that for gradients is worth a word
_FEW_FILES = 1024


@dataclass
class Patient:
    """The run that is examined, as far as the doctor needs to know it."""

    rank: int
    world_size: int
    local_rank: int
    processes: int
    """On this host."""
    device: torch.device
    folder: Path
    """The run's folder, the same on all ranks."""
    shared: bool
    """Whether all hosts must see it."""
    facts: dict[str, Any]
    configuration: Mapping[str, Any]
    accumulation: int
    gradient_bytes: int
    checkpoint_bytes: int
    checkpoints: int
    """How many will be kept."""
    compute: Callable[[int], None]
    """Puts a micro-batch of so many samples through the network and back."""
    load: Callable[[], Iterator[int]]
    """The training loader: yields the samples of each micro-batch."""
    prepare: Callable[[], None]
    """Puts the data on this host where it isn't there; called by its first rank."""
    fingerprint: Callable[[], dict[str, Any]]
    """Opens the data, and says what it is: counts, and a hash of a few samples."""
    sizes: Callable[[], tuple[int, int]]
    """Samples in a micro-batch and processes of its loader, of data that was opened."""
    micro_batch: int = 1
    workers: int = 0


class Doctor:
    """Examines a run on all its ranks; `findings` is complete on rank 0."""

    def __init__(self, patient: Patient, meeting: Meeting | None, route: Route | None, fast: bool) -> None:
        self.patient, self.meeting, self.route, self.fast = patient, meeting, route, fast
        self.findings: list[Finding] = []
        self.hosts = meeting.hosts if meeting else [os.uname().nodename]
        # Its own groups, with a deadline: a collective that hangs must not take the default half hour.
        limit = timedelta(seconds=30)
        self.control: Any = dist.new_group(backend="gloo", timeout=limit) if meeting else None
        self.group: Any = dist.new_group(timeout=limit) if meeting else None
        self._sync = network.Model(0.0, float("inf"))
        self._sample_bytes, self._has_data = 0, False

    def examine(self) -> None:
        for check in (self._versions, self._hardware, self._names, self._data, self._folder, self._limits, self._clocks):
            check()
        self._collectives()
        if not self.fast:
            self._links()
        if not self.fast and self._has_data:
            step = self._compute()
            if step is not None:
                self._memory()
                self._share(step)
            self._loader(step)

    # How a check is made ---------------------------------------------------------------------------------------------

    def _gather(self, mine: Any) -> list[Any]:
        if self.control is None:
            return [mine]
        answers: list[Any] = [None] * self.patient.world_size
        dist.all_gather_object(answers, mine, group=self.control)
        return answers

    def _measure(self, check: str, measure: Callable[[], Any], fix: str = "", bad: bool = True) -> list[Any] | None:
        """What all ranks measured; None when one of them couldn't, which is then a finding."""
        try:
            mine, error = measure(), None
        except Exception as raised:
            log.debug("doctor: %s", check, exc_info=True)
            mine, error = None, f"{type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised) else ''}"
        answers = self._gather((mine, error))
        failed = {rank: text for rank, (_, text) in enumerate(answers) if text}
        if failed:
            texts = {text: [rank for rank in failed if failed[rank] == text] for text in failed.values()}
            troubles = [Trouble(f"{named(ranks, self.hosts)}: {text}", ranks, bad) for text, ranks in texts.items()]
            self._row(check, troubles, "", fix)
            return None
        return [value for value, _ in answers]

    def _row(self, check: str, troubles: Sequence[Trouble], good: str, fix: str = "", **figures: Any) -> None:
        self.findings.append(row(check, troubles, self.hosts, good, fix, figures))

    # The same everywhere? --------------------------------------------------------------------------------------------

    def _versions(self) -> None:
        all_facts = self._gather(self.patient.facts)
        odd = facts.compare(self.patient.facts, self.patient.configuration, self.hosts, self._gather)
        here = self.patient.facts
        shown = ", ".join(
            f"{name} {here[name]}" for name in ("Python", "torch", "lightning", "CUDA", "commit") if here[name] != "none"
        )
        fix = "Install the same versions everywhere (scripts/setup), and start every rank with the same words."
        self._row("versions", [Trouble(text, ranks) for text, ranks in odd.items()], shown, fix, facts=all_facts)

    def _hardware(self) -> None:
        all_facts = self._gather(self.patient.facts)
        odd = facts.different(all_facts, self.hosts, facts.ALIKE)
        here = self.patient.facts
        kind = f"{here['CPU']}, {here['cores']} core(s)"
        if here["devices"]:
            kind = f"{here['devices']} x {here['device']}, {here['memory']}, driver {here['driver']}"
        shown = f"{len(set(self.hosts))} host(s), each {kind}"
        fix = "The fastest wait for the slowest: use one kind of machine, or expect the pace of the slowest."
        self._row("hardware", [Trouble(text, ranks, bad=False) for text, ranks in odd.items()], shown, fix)

    # Network ---------------------------------------------------------------------------------------------------------

    def _names(self) -> None:
        """The meeting has shown already that every host reaches every other; here is by which way."""
        if self.meeting is None:
            return self._row("network", [], "one process: none is needed")
        all_found = self._gather(self._my_network())
        troubles = []
        for rank in self.meeting.leaders():
            found = all_found[rank]
            troubles += [Trouble(f"{named([rank], self.hosts)}: {text}", [rank], bad=False) for text in found["doubts"]]
        ways = ", ".join(f"{self.hosts[rank]} by {all_found[rank]['way']}" for rank in self.meeting.leaders()[:8])
        self._row(
            "network",
            troubles,
            f"every host reaches every other; {ways}",
            "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or leave both unset.",
            network=all_found,
        )
        return None

    def _my_network(self) -> dict[str, Any]:
        assert self.meeting is not None
        if self.route is None:
            return {"way": os.environ.get("GLOO_SOCKET_IFNAME", "loopback"), "doubts": []}
        doubts = []
        others = [host for host in dict.fromkeys(self.hosts) if host != self.hosts[self.patient.rank]]
        towards = self.meeting.address if self.patient.rank else next(iter(others), self.meeting.address)
        found = resolve(towards)
        taken = source(found[0]) if found else None
        if not self.route.chosen and taken and taken != self.route.address and not is_loopback(taken):
            doubts.append(f"GLOO_SOCKET_IFNAME={self.route}, and packets to {towards} go out from {taken}")
        own = resolve(self.hosts[self.patient.rank])
        note = f", though its own name says {own[0]}" if own and is_loopback(own[0]) else ""
        return {"way": f"{self.route}{note}", "doubts": doubts, "addresses": addresses(), "resolves": {towards: found}}

    # Disk, limits, clocks --------------------------------------------------------------------------------------------

    def _folder(self) -> None:
        patient = self.patient
        place = patient.folder, patient.rank, self.hosts, self._gather
        if patient.shared:
            problem, good, fix = shared.folder_problem(*place), "written on one, read on all", shared.SHARE
        else:
            problem, good, fix = shared.moved(*place), "only rank 0's host needs it (trainer.shared_folder=false)", shared.MOVE
        self._row("run's folder", [Trouble(*problem)] if problem else [], f"{patient.folder}: {good}", fix)

    def _limits(self) -> None:
        patient = self.patient
        all_limits = self._gather(facts.limits(patient.folder))
        troubles = []
        need = patient.checkpoint_bytes * (patient.checkpoints + 1)
        free = all_limits[0]["disk"]
        if free is not None and free < need:
            kept = f"{patient.checkpoints + 1} checkpoints of {in_bytes(patient.checkpoint_bytes)}"
            troubles.append(Trouble(f"{named([0], self.hosts)}: {in_bytes(free)} of disk are left for {kept}", [0]))
        few = [rank for rank, one in enumerate(all_limits) if one["open files"] < _FEW_FILES + 4 * patient.world_size]
        if few:
            number = all_limits[few[0]]["open files"]
            troubles.append(Trouble(f"{named(few, self.hosts)}: at most {number} open files", few, bad=False))
        batches = patient.micro_batch * patient.workers * 2 * patient.processes * self._sample_bytes
        small = [rank for rank, one in enumerate(all_limits) if one["/dev/shm"] is not None and one["/dev/shm"] < batches]
        if small:
            text = (
                f"{in_bytes(all_limits[small[0]]['/dev/shm'])} of /dev/shm, and the loaders' workers take {in_bytes(batches)}"
            )
            troubles.append(Trouble(f"{named(small, self.hosts)}: {text}", small))
        loaded = self._gather((patient.workers + 1) * patient.processes > cores(1) and patient.workers > 0)
        over = [rank for rank, too_many in enumerate(loaded) if too_many]
        if over:
            text = f"{patient.processes} process(es) with {patient.workers} workers each on {cores(1)} core(s)"
            troubles.append(Trouble(f"{named(over, self.hosts)}: {text}", over, bad=False))
        good = (
            f"{in_bytes(free)} of disk for {in_bytes(need)} of checkpoints" if free is not None else "the disk is not there yet"
        )
        fix = "Free disk, or keep fewer checkpoints; ulimit -n 65536; docker --shm-size=8g; data.num_workers=auto."
        self._row("limits", troubles, good, fix, limits=all_limits)

    def _clocks(self) -> None:
        if self.control is None:
            return self._row("clocks", [], "one process")
        self._gather(None)
        dist.barrier(group=self.control)
        times = self._gather(time.time())
        usual = statistics.median_low(times)
        off = [rank for rank, at in enumerate(times) if abs(at - usual) > _SKEW]
        troubles = [
            Trouble(f"{named([rank], self.hosts)}: its clock is {times[rank] - usual:+.1f} s off", [rank], bad=False)
            for rank in off
        ]
        spread = max(times) - min(times)
        self._row("clocks", troubles, f"agree to {max(spread, 0.001):.3f} s", "Let NTP (chrony) set the clocks.", times=times)
        return None

    # Data ------------------------------------------------------------------------------------------------------------

    def _data(self) -> None:
        fix = "The data must be there on every host: data.source."
        first = self.patient.local_rank == 0
        if self._measure("data", self.patient.prepare if first else lambda: None, fix) is None:
            return None
        prints = self._measure("data", self.patient.fingerprint, fix)
        sizes = None if prints is None else self._measure("data", self.patient.sizes, fix)
        if prints is None or sizes is None:
            return None
        self.patient.micro_batch, self.patient.workers = sizes[self.patient.rank]
        self._has_data = True
        if not prints[0]:
            return self.findings.append(Finding("data", "skipped", "the data says nothing of itself (no fingerprint)"))
        self._sample_bytes = int(prints[0]["train"]["bytes"])
        seen = [
            {"data": ", ".join(f"{one['samples']:,} {split} ({one['hash']})" for split, one in each.items())} for each in prints
        ]
        odd = facts.different(seen, self.hosts, ["data"])
        troubles = [Trouble(text, ranks) for text, ranks in odd.items()]
        self._row("data", troubles, f"the same everywhere: {seen[0]['data']}", "Copy or mount the same data on every host.")
        return None

    # Collectives -----------------------------------------------------------------------------------------------------

    def _collectives(self) -> None:
        if self.meeting is None:
            return self._row("collectives", [], "one process: none are needed")
        wrong = self._measure(
            "collectives", self._wrong_collectives, "Try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1; see --debug true."
        )
        if wrong is None:
            return None
        troubles = [
            Trouble(f"{named([rank], self.hosts)}: wrong result of {', '.join(names)}", [rank])
            for rank, names in enumerate(wrong)
            if names
        ]
        self._row(
            "collectives",
            troubles,
            "all-reduce, all-gather and broadcast give right results",
            "Run a memory and link test of that host.",
        )
        return None

    def _wrong_collectives(self) -> list[str]:
        """The collectives that give this rank something else than arithmetic says."""
        rank, size, device = self.patient.rank, self.patient.world_size, self.patient.device
        base = torch.arange(65_536, device=device, dtype=torch.int64)
        wrong = []
        total = base * (rank + 1)
        dist.all_reduce(total, group=self.group)
        if not torch.equal(total, base * (size * (size + 1) // 2)):
            wrong.append("all-reduce")
        parts = [torch.empty_like(base) for _ in range(size)]
        dist.all_gather(parts, base + rank, group=self.group)
        if not all(torch.equal(part, base + other) for other, part in enumerate(parts)):
            wrong.append("all-gather")
        told = base * 7 if rank == 0 else torch.zeros_like(base)
        dist.broadcast(told, 0, group=self.group)
        if not torch.equal(told, base * 7):
            wrong.append("broadcast")
        return wrong

    def _links(self) -> None:
        if self.meeting is None:
            return
        times = network.all_reduce_times(self.patient.device, self.group, self.control)
        self._sync = network.fit(times)
        speeds = {size: network.bus_bandwidth(size, seconds, self.patient.world_size) for size, seconds in times.items()}
        largest = max(speeds)
        shown = f"all-reduce: {times[min(times)] * 1e6:,.0f} us latency, {in_bytes(speeds[largest])}/s at {in_bytes(largest)}"
        leaders = self.meeting.leaders()
        pairs = network.pair_times(self.patient.rank, leaders, self.control, self._gather) if len(leaders) > 1 else {}
        bad, links, usual = network.slow_links(pairs)
        troubles = [
            Trouble(
                f"{self.hosts[rank]}: every link of this host is slow, at most "
                f"{in_bytes(max(speed for pair, speed in pairs.items() if rank in pair))}/s, elsewhere {in_bytes(usual)}/s",
                [rank],
                bad=False,
            )
            for rank in bad
        ]
        troubles += [
            Trouble(
                f"{self.hosts[a]} - {self.hosts[b]}: {in_bytes(pairs[a, b])}/s, elsewhere {in_bytes(usual)}/s",
                [a, b],
                bad=False,
            )
            for a, b in links
        ]
        by_pair = {f"{self.hosts[a]} - {self.hosts[b]}": speed for (a, b), speed in pairs.items()}
        fix = "Look at its cable, port and driver, or leave the host out."
        self._row("links", troubles, shown, fix, all_reduce=times, bus_bandwidth=speeds, pairs=by_pair)

    # The model on this device ----------------------------------------------------------------------------------------

    def _compute(self) -> float | None:
        """Seconds that the slowest rank takes for a micro-batch."""
        fix = "See the error. A step is tried outside of a fit here; a smaller data.batch_size needs less memory."
        taken = self._measure("compute", self._time_compute, fix, bad=False)
        if taken is None:
            return None
        usual = statistics.median_low(taken)
        slow = [rank for rank, seconds in enumerate(taken) if seconds > _SLOW * usual]
        troubles = [
            Trouble(
                f"{named([rank], self.hosts)}: {taken[rank] / usual:.1f} times slower than the others "
                f"({self.patient.micro_batch / taken[rank]:,.0f} samples/s, elsewhere {self.patient.micro_batch / usual:,.0f})",
                [rank],
                bad=False,
            )
            for rank in slow
        ]
        good = f"{self.patient.micro_batch / usual:,.0f} samples/s on each rank, equal to {max(taken) / min(taken) - 1:.0%}"
        fix = "Is something else running there? Is it throttled (temperature, power, a cgroup's CPU limit)?"
        self._row("compute", troubles, good, fix, seconds=taken)
        return float(max(taken))

    def _time_compute(self) -> float:
        self.patient.compute(self.patient.micro_batch)  # the first one is slower
        if self.control is not None:
            dist.barrier(group=self.control)  # all at once, as in training
        times, start = 0, network.now(self.patient.device)
        while times < 3 or (network.now(self.patient.device) - start < _SECONDS and times < 1000):
            self.patient.compute(self.patient.micro_batch)
            times += 1
        # The mean and not the median: a rank that is throttled runs at full speed in between.
        return (network.now(self.patient.device) - start) / times

    def _memory(self) -> None:
        peaks = self._measure("memory", self._peaks, "Set data.batch_size lower.")
        if peaks is None:
            return
        largest = []
        for fixed, each, free in peaks:
            largest.append(int((free - fixed) / each) if each > 0 else 0)
        fits = min(largest)
        tight = [rank for rank, most in enumerate(largest) if 0 < most < self.patient.micro_batch]
        troubles = (
            [
                Trouble(
                    f"{named(tight, self.hosts)}: a micro-batch of {self.patient.micro_batch} does not fit, {fits} would", tight
                )
            ]
            if tight
            else []
        )
        shown = f"a micro-batch of {self.patient.micro_batch} fits"
        if fits > 0:
            shown += f"; the largest that does: about {_round_down(fits):,}"
        self._row("memory", troubles, shown, f"Set data.batch_size={_round_down(max(1, fits))}.", largest=largest)

    def _peaks(self) -> tuple[float, float, float]:
        """Bytes that are needed whatever the micro-batch, bytes for each sample, and bytes that there are."""
        many, few = self.patient.micro_batch, max(1, self.patient.micro_batch // 2)
        device = self.patient.device
        high, low = _peak(lambda: self.patient.compute(many), device), _peak(lambda: self.patient.compute(few), device)
        each = max(0.0, (high - low) / (many - few)) if many > few else 0.0
        if device.type == "cuda":
            free = float(torch.cuda.get_device_properties(device).total_memory) * 0.95
            return max(0.0, high - each * many), each, free
        left = facts.limits(self.patient.folder)["memory"] or 0
        return 0.0, each, left / self.patient.processes + each * many

    def _share(self, step: float) -> None:
        if self.meeting is None:
            return
        sync = self._sync.seconds(self.patient.gradient_bytes)
        compute = step * self.patient.accumulation
        share = sync / (sync + compute)
        text = (
            f"{in_bytes(self.patient.gradient_bytes)} of gradients a step take {sync * 1e3:,.1f} ms, computing "
            f"{compute * 1e3:,.1f} ms: {share:.0%} of a step, less what overlaps"
        )
        troubles = [Trouble(text, [], bad=False)] if share > _SYNC else []
        fix = "A larger data.global_batch_size (more accumulation) syncs less often; a faster network, or fewer hosts."
        self._row("gradient sync", troubles, text, fix, seconds=sync, share=share)

    def _loader(self, step: float | None) -> None:
        speeds = self._measure("loader", self._time_loader, "The loader must run on every host: data.source, data.num_workers.")
        if speeds is None:
            return
        if step is None:
            self._row("loader", [], f"{min(speeds):,.0f} samples/s on the slowest rank", speeds=speeds)
            return
        needed = self.patient.micro_batch / step
        slow = [rank for rank, speed in enumerate(speeds) if speed < needed]
        troubles = [
            Trouble(
                f"{named([rank], self.hosts)}: {speeds[rank]:,.0f} samples/s, and the device takes {needed:,.0f}",
                [rank],
                bad=False,
            )
            for rank in slow
        ]
        good = f"{min(speeds):,.0f} samples/s on the slowest rank, {min(speeds) / needed:,.1f} times what the device takes"
        self._row("loader", troubles, good, "More data.num_workers (and cores), or data on a faster disk.", speeds=speeds)

    def _time_loader(self) -> float:
        batches = self.patient.load()
        next(batches)  # workers start
        samples, start = 0, time.perf_counter()
        for count in batches:
            samples += count
            if time.perf_counter() - start > _SECONDS:
                break
        return samples / (time.perf_counter() - start) if samples else float("inf")


def _peak(run: Callable[[], None], device: torch.device) -> float:
    """The most memory that something takes at once."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return float(torch.cuda.max_memory_allocated(device))
    try:
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        run()
        return _resident("VmHWM") - before
    except OSError:
        return 0.0


def _resident(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return float(line.split()[1]) * 1024
    return 0.0


def _round_down(number: int) -> int:
    """To a power of two or one and a half of one: a number that someone would set."""
    power = 1 << (number.bit_length() - 1)
    return power + power // 2 if number >= power + power // 2 and power > 1 else power
