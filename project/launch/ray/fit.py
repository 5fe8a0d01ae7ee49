"""One training under Ray: a placement group with a supervisor for each rank, all of them started again after a failure.

Ray's own FailureConfig counts how often a worker failed. It does not know that a wrong key fails each time, that a run which
was stopped has not failed, nor that a run which comes to no new checkpoint will not by trying again.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from project.errors import LEFT_OUT, TRY_AGAIN, WRONG
from project.launch.nodes import Nodes
from project.launch.ray.cluster import last_line, say
from project.launch.ray.room import Room, draining_nodes
from project.launch.ray.supervisor import Supervisor
from project.launch.supervisor import REPLACES_HOSTS
from project.survive.signals import EXIT_CODES, code_of_rank

STOPPED = {*EXIT_CODES.values()}
"""Exit codes of a run that was stopped, and saved."""
_MOST = 3  # starts in a row without a new checkpoint
_LAST_WORDS = 10.0  # seconds that ranks have to end by themselves when another has failed: to say which it was, and to save
_SHRINK = 20.0  # seconds without room for the workers, after which an elastic run takes fewer
_EVERY = 30  # seconds from one look for more room to the next
_ANSWER = 60.0  # seconds for Ray to start the actors
# These variables of the driver go to the ranks. Not PROJECT_NODE and PROJECT_IMAGE: the ranks may be on other nodes.
_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_", "CUBLAS_", "WANDB_", "MLFLOW_", "PYTHONHASHSEED", "OMP_")


def passed_on(grace: float) -> dict[str, str]:
    """Returns what the ranks have of this process's environment."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = f"{grace:g}"  # the training warns of a checkpoint that takes longer
    return environment


def layout(nodes: Sequence[str], gpus: Sequence[str]) -> list[dict[str, str]]:
    """Returns torchrun's variables for each rank, where the ranks of a node follow each other.

    Nodes with different numbers of ranks are not what torchrun has: there each rank counts as a node of its own.
    """
    counts = {nodes.count(node) for node in nodes}
    each = counts.pop() if len(counts) == 1 else 1
    variables = []
    for rank in range(len(nodes)):
        local = rank % each
        own = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(each)}
        if visible := ",".join(dict.fromkeys(gpus[rank - local :][:each])):
            own["CUDA_VISIBLE_DEVICES"] = visible
        variables.append(Nodes(len(nodes), each).environment(rank) | own)
    return variables


def shown(code: int) -> str:
    """Returns how a process ended, in words."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


@dataclass
class Start:
    """One start of all ranks, and how it ended."""

    hosts: list[str] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks whose supervisors are lost, and Ray's reason."""
    moved: str = ""
    """The reason why the ranks were stopped to be placed anew."""

    def note_end(self, rank: int, code: int, signals: Sequence[int]) -> None:
        """Notes a rank's exit code. One that was to stop may have died of a second signal when it had saved: Ray's own."""
        stopped = (self.moved or signals) and 128 - code in STOPPED
        self.codes[rank] = 128 - code if stopped else code_of_rank(code)

    def failure(self) -> int:
        """Returns rank 0's exit code, else another's; of a rank that a signal killed, a shell's."""
        codes = [TRY_AGAIN if code == LEFT_OUT else code for _, code in sorted(self.codes.items()) if code]
        return next((code for code in codes if code > 0), 128 - codes[0] if codes else TRY_AGAIN)

    def cause(self) -> str:
        """Returns which ranks failed; those that only lost another one are left out where that one is known."""
        codes = {rank: code for rank, code in sorted(self.codes.items()) if code}
        codes = {rank: code for rank, code in codes.items() if code != TRY_AGAIN} or codes
        texts = [f"rank {rank} on {self.hosts[rank]}: {shown(code)}" for rank, code in codes.items()]
        texts += [f"rank {rank} on {self.hosts[rank]} is lost: {why}" for rank, why in sorted(self.lost.items())]
        return "; ".join(texts) or "not all ranks have ended"

    def left_out(self) -> set[str]:
        """Returns the hosts that have lost too many ranks, or are unfit, as their supervisors say by their exit code."""
        return {self.hosts[rank] for rank, code in self.codes.items() if code == LEFT_OUT}

    def fit_hosts(self) -> set[str]:
        """Returns the hosts that were in use, and on which no rank was lost or failed."""
        suspects = {rank for rank, code in self.codes.items() if code not in (0, TRY_AGAIN, *STOPPED)} | self.lost.keys()
        return {*self.hosts} - {self.hosts[rank] for rank in suspects}

    def end(self, signals: Sequence[int]) -> int | None:
        """Returns the exit code of a run that is over; None where the ranks have failed, or were stopped to be placed anew."""
        codes, complete = set(self.codes.values()), len(self.codes) == len(self.hosts)
        if complete and codes == {0}:
            return 0
        if signals:
            return max(codes & STOPPED, default=self.failure() if codes else 128 + signals[0])
        if WRONG in codes:
            return WRONG
        stopped = complete and codes <= STOPPED and not self.moved  # by somebody, at a rank: that is no failure
        return max(codes) if stopped else None


class Fit:
    """The driver of a training. `signals` grows by each signal that this process receives."""

    patience = 30.0
    """Seconds without room for the workers, after which the user is told."""

    def __init__(self, options: argparse.Namespace, signals: Sequence[int]) -> None:
        self._options, self._signals = options, signals
        self._room = Room(options)
        self._fit_hosts: set[str] | None = None  # those that need no check when they join; None: any, at the first start

    def run(self) -> int:
        """Starts the training until it has ended, and returns its exit code."""
        start, most, failures = Start(), self._options.max_failures, 0
        newest: list[str] = []
        while (group := self._place()) is not None:
            newest.append(max((file.name for file in self._options.folder.glob("checkpoints/step-*.ckpt")), default="none"))
            if len(newest) > _MOST and len(set(newest[-_MOST - 1 :])) == 1:
                why = f"it was started {_MOST} times and came to no new checkpoint"
                hint = "the lines above say why; checkpoints.every_n_minutes saves more often"
                self.say("ERROR", f"The run is not started again: {why}. HINT: {hint}.")
                return start.failure()
            start = Start()
            try:
                self._train(group, start)
            finally:
                remove_placement_group(group)  # ends the actors, and so the ranks
            if (code := start.end(self._signals)) is not None:
                return code
            self._fit_hosts = start.fit_hosts()
            if start.moved and not start.lost and set(start.codes.values()) <= {*STOPPED, TRY_AGAIN}:
                self.say("INFO", f"Ray starts the workers again: {start.moved}.")
                continue
            if bad := start.left_out():
                self._room.leave_out(bad)
                self.say("WARNING", f"Ray starts the workers again without {', '.join(sorted(bad))}.")
                continue
            failures += 1
            if 0 <= most < failures:
                why = f"{start.cause()}; so many failures: {failures} (--max-failures {most})"
                self.say("ERROR", f"The run is not started again: {why}.")
                return start.failure()
            self.say("WARNING", f"Ray starts the workers again (failure {failures} of {most}): {start.cause()}.")
        return 128 + self._signals[0]

    def say(self, level: str, text: str) -> None:
        """Prints a line of the driver's own."""
        say(level, text)

    def show(self, descriptor: int, text: bytes) -> None:
        """Prints what a rank has printed."""
        stream = sys.stdout if descriptor == 1 else sys.stderr
        stream.buffer.write(text)
        stream.flush()

    def _place(self) -> PlacementGroup | None:
        """Returns a placement group with a bundle for each worker, when there is room; None where a signal came before."""
        count, began, warned = self._room.workers(), time.monotonic(), False
        group, since = self._room.reserve(count), began
        while not self._signals:
            if group.wait(0.5):
                return group
            now = time.monotonic()
            if now > since + _SHRINK and (readmitted := self._room.readmit()):
                self.say("WARNING", f"There is no room without {', '.join(sorted(readmitted))}: Ray may use it again.")
                remove_placement_group(group)
                group, since = self._room.reserve(count), now
            elif now > since + _SHRINK and count > self._options.min_workers:
                remove_placement_group(group)
                count -= 1
                group, since = self._room.reserve(count), now
            if now > began + self.patience and not warned:
                warned, free = True, ray.available_resources()
                each = ", ".join(f"{value:g} {name}" for name, value in self._room.needs.items())
                rest = ", ".join(f"{free.get(name, 0):g} {name}" for name in self._room.needs)
                why = f"Ray has no room yet for {count} worker(s) with {each} each; free in all: {rest}"
                self.say("WARNING", f"{why}. Waiting.")
        remove_placement_group(group)
        return None

    def _train(self, group: PlacementGroup, start: Start) -> None:
        """Starts a rank in each bundle, and watches them until all have ended, or are to be ended."""
        nodes_of, count = placement_group_table(group)["bundles_to_node_id"], group.bundle_count
        bundles = sorted(range(count), key=lambda bundle: str(nodes_of[bundle]))  # a node's ranks side by side
        nodes, start.hosts = [nodes_of[bundle] for bundle in bundles], ["an unknown host"] * count
        actor = ray.remote(num_cpus=self._room.needs.get("CPU", 0), num_gpus=self._room.needs.get("GPU", 0))(Supervisor)
        strategies = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in bundles]
        actors = [actor.options(scheduling_strategy=strategy).remote() for strategy in strategies]
        try:
            places = ray.get([supervisor.place.remote() for supervisor in actors], timeout=_ANSWER)
            start.hosts = [place.host for place in places]
            counts = {host: start.hosts.count(host) for host in start.hosts}
            each = ", ".join(f"{host} x {many}" if many > 1 else host for host, many in counts.items())
            self.say("INFO", f"Ray: {count} worker{'s' * (count > 1)} on {each}")
            common = passed_on(self._options.grace) | {"TORCHELASTIC_RUN_ID": self._options.name}
            common |= {REPLACES_HOSTS: "1"} if all(self._room.can_spare(host) for host in {*start.hosts}) else {}
            common |= {"MASTER_ADDR": places[0].address, "MASTER_PORT": str(places[0].port)}
            variables = layout(nodes, [place.gpus for place in places])
            starts = [
                supervisor.start.remote(
                    self._options.words, common | own, nodes.count(node), self._options.cwd,
                    own["LOCAL_RANK"] == "0" and self._fit_hosts is not None and host not in self._fit_hosts,
                )
                for supervisor, own, node, host in zip(actors, variables, nodes, start.hosts, strict=True)
            ]  # fmt: skip
            ray.get(starts, timeout=_ANSWER)
        except ray.exceptions.RayError as error:
            start.lost[0] = last_line(error)
        else:
            self._watch(actors, nodes, start)

    def _watch(self, actors: list["ray.actor.ActorHandle"], nodes: list[str], start: Start) -> None:
        """Passes signals on, until all ranks have ended, or have had the time that they may take."""
        polls = {supervisor.poll.remote(): rank for rank, supervisor in enumerate(actors)}
        passed, deadline, looks = [0] * len(actors), float("inf"), 0
        began = time.monotonic()
        stops: list[int] = []
        while polls and time.monotonic() < deadline:
            for answer in ray.wait(list(polls), timeout=0.5)[0]:
                rank = polls.pop(answer)
                if self._read(answer, rank, start):
                    signals = [*stops, *self._signals]
                    polls[actors[rank].poll.remote(signals[passed[rank] :])] = rank
                    passed[rank] = len(signals)
            if time.monotonic() > began + looks and not (stops or self._signals or start.codes or start.lost):
                looks += 1  # a look each second: Ray is asked over the network
                start.moved = self._moves(nodes, start.hosts, looks % _EVERY == 0)
                stops = [signal.SIGTERM] if start.moved else []
            if deadline == float("inf") and (stops or self._signals):
                deadline = time.monotonic() + self._options.grace
            elif deadline == float("inf") and (start.lost or any(start.codes.values())):
                deadline = time.monotonic() + _LAST_WORDS

    def _read(self, answer: "ray.ObjectRef", rank: int, start: Start) -> bool:
        """Shows what a rank has printed; returns whether it still runs, or else notes how it ended."""
        try:
            lines, code = ray.get(answer)
        except ray.exceptions.RayError as error:
            start.lost[rank] = last_line(error)
            return False
        for descriptor, text in lines:
            self.show(descriptor, text)
        if code is not None:
            start.note_end(rank, code, self._signals)
        return code is None

    def _moves(self, nodes: list[str], hosts: list[str], grows: bool) -> str:
        """Returns why the ranks are to be placed anew: a host is taken away, or there is room for more of them."""
        draining = draining_nodes()
        if taken := sorted({host for node, host in zip(nodes, hosts, strict=True) if node in draining}):
            return f"{', '.join(taken)} is taken away"
        more = self._room.workers() - len(nodes) if grows else 0
        if more <= 0:
            return ""
        group = self._room.reserve(more)
        fits = group.wait(2)
        remove_placement_group(group)
        return "another number of workers" if fits else ""
