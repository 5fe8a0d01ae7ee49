"""The doctor's checks of the network between the ranks: its interfaces, right results, speed, and its share of a step."""

import os
from functools import partial
from typing import TypedDict

import torch
import torch.distributed as dist
from typing_extensions import NotRequired

from project.cluster.interfaces import addresses, is_loopback, resolve, source_towards
from project.doctor import network
from project.doctor.findings import Examination, Trouble, in_bytes

_SYNC = 0.3  # share of a step: more than that for gradients is worth a word


def interfaces(this: Examination) -> None:
    """Shows by which way every host reaches every other; the rendezvous has tested already that they do."""
    if this.rendezvous is None:
        this.add("network", [], "one process: none is needed")
        return
    reports, leaders = this.gather(_my_network(this)), this.rendezvous.leaders()
    troubles = [this.trouble([rank], text, bad=False) for rank in leaders for text in reports[rank]["doubts"]]
    ways = ", ".join(f"{this.hosts[rank]} by {reports[rank]['way']}" for rank in leaders[:8])
    fix = "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or leave both unset."
    this.add("network", troubles, f"every host reaches every other; {ways}", fix, network=reports)


class _Ways(TypedDict):
    """The ways of a rank to the others."""

    way: str
    doubts: list[str]
    addresses: NotRequired[dict[str, list[str]]]
    resolves: NotRequired[dict[str, list[str]]]


def _my_network(this: Examination) -> _Ways:
    assert this.rendezvous is not None
    if this.route is None:
        return {"way": os.environ.get("GLOO_SOCKET_IFNAME", "loopback"), "doubts": []}
    doubts = []
    others = [host for host in dict.fromkeys(this.hosts) if host != this.hosts[this.run.rank]]
    towards = this.rendezvous.address if this.run.rank else next(iter(others), this.rendezvous.address)
    taken = source_towards(towards)
    if not this.route.chosen and taken and taken != this.route.address and not is_loopback(taken):
        doubts.append(f"GLOO_SOCKET_IFNAME={this.route}, and packets to {towards} go out from {taken}")
    own = resolve(this.hosts[this.run.rank])
    note = f", though its own name says {own[0]}" if own and is_loopback(own[0]) else ""
    return {"way": f"{this.route}{note}", "doubts": doubts, "addresses": addresses(), "resolves": {towards: resolve(towards)}}


def collectives(this: Examination) -> None:
    if this.rendezvous is None:
        this.add("collectives", [], "one process: none are needed")
        return
    fix = "Try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1; see --debug true."
    wrong = this.measure("collectives", partial(_wrong_collectives, this), fix)
    if wrong is None:
        return
    troubles = [this.trouble([rank], f"wrong result of {', '.join(names)}") for rank, names in enumerate(wrong) if names]
    good = "all-reduce, all-gather and broadcast give right results"
    this.add("collectives", troubles, good, "Run a memory and link test of that host.")


def _wrong_collectives(this: Examination) -> list[str]:
    """Returns the collectives whose result on this rank differs from arithmetic."""
    rank, size, device = this.run.rank, this.run.world_size, this.run.device
    base = torch.arange(65_536, device=device, dtype=torch.int64)
    wrong = []
    total = base * (rank + 1)
    dist.all_reduce(total, group=this.group)
    if not torch.equal(total, base * (size * (size + 1) // 2)):
        wrong.append("all-reduce")
    parts = [torch.empty_like(base) for _ in range(size)]
    dist.all_gather(parts, base + rank, group=this.group)
    if not all(torch.equal(part, base + other) for other, part in enumerate(parts)):
        wrong.append("all-gather")
    message = base * 7 if rank == 0 else torch.zeros_like(base)
    dist.broadcast(message, 0, group=this.group)
    if not torch.equal(message, base * 7):
        wrong.append("broadcast")
    return wrong


def speed(this: Examination) -> None:
    if this.rendezvous is None:
        return
    times = network.all_reduce_times(this.run.device, this.group, this.control)
    this.all_reduce = times
    speeds = {size: network.bus_bandwidth(size, seconds, this.run.world_size) for size, seconds in times.items()}
    largest = max(speeds)
    shown = f"all-reduce: {times[min(times)] * 1e6:,.0f} us latency, {in_bytes(speeds[largest])}/s at {in_bytes(largest)}"
    leaders = this.rendezvous.leaders()
    pairs = network.pair_times(this.run.rank, leaders, this.control, this.gather) if len(leaders) > 1 else {}
    bad, links, typical = network.slow_links(pairs)
    troubles, elsewhere = list[Trouble](), f"elsewhere {in_bytes(typical)}/s"
    for rank in bad:
        most = in_bytes(max(speed for pair, speed in pairs.items() if rank in pair))
        text = f"{this.hosts[rank]}: every link of this host is slow, at most {most}/s, {elsewhere}"
        troubles.append(Trouble(text, [rank], bad=False))
    names = {(a, b): f"{this.hosts[a]} - {this.hosts[b]}" for a, b in pairs}
    troubles += [Trouble(f"{names[pair]}: {in_bytes(pairs[pair])}/s, {elsewhere}", [*pair], bad=False) for pair in links]
    fix = "Look at its cable, port and driver, or leave the host out."
    this.add(
        "links",
        troubles,
        shown,
        fix,
        all_reduce=times,
        bus_bandwidth=speeds,
        pairs={names[pair]: pairs[pair] for pair in pairs},
    )


def gradient_sync(this: Examination, step: float) -> None:
    if this.rendezvous is None:
        return
    sync = network.fitted_seconds(this.all_reduce, this.run.gradient_bytes)
    compute = step * this.run.trainer.accumulate_grad_batches
    share = sync / (sync + compute)
    text = (
        f"{in_bytes(this.run.gradient_bytes)} of gradients a step take {sync * 1e3:,.1f} ms, computing "
        f"{compute * 1e3:,.1f} ms: {share:.0%} of a step, less what overlaps"
    )
    troubles = [Trouble(text, [], bad=False)] if share > _SYNC else []
    fix = "A larger data.global_batch_size (more accumulation) syncs less often; a faster network, or fewer hosts."
    this.add("gradient sync", troubles, text, fix, seconds=sync, share=share)
