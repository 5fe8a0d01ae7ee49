"""Turns a hang into a named rank, its stacks and an exit, within a deadline that follows from the run's own step times.

The main thread notes its progress in memory. A thread beside it reports to rank 0's once in a while; when a rank has made no
progress for too long, rank 0's finds the one that all wait for: a rank that is not heard any more, or else the one that is
furthest behind. Then every rank writes its stacks into the run's folder, one on each host reports whose fault it is, and all
end with exit code 75, 'try again': torchrun and Slurm can start the run anew, and it resumes from its checkpoint.
"""

import logging
import math
import os
import socket
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from project.checkpoints.callback import checkpoints_of
from project.cluster.interfaces import mtu, own_address
from project.cluster.place import host
from project.cluster.processes import start_time
from project.errors import Cause, UserError, listed
from project.launch import early_start
from project.launch.fork_server import tell_supervisor
from project.launch.orphans import is_supervised, launcher_pid
from project.survive import failure
from project.survive.exit import forbid_core_dumps
from project.survive.failure import LOST_RANKS
from project.survive.hang import flights, stacks, verdict
from project.survive.hang.heartbeats import Channel, Flight, Heartbeat, Member, heartbeat_from_dict, machine_id
from project.survive.hang.leaving import RankContext, exit_after_loss
from project.survive.hang.verdict import RankAtFault, Verdict, verdict_on
from project.survive.hang.warden import WardenProcess

log = logging.getLogger(__name__)

_TICK = 1.0  # seconds between two looks
_LATE_WARDEN = 2.0  # seconds: ranks that have just been started again need the cores themselves
_LATEST_WARDEN = 20.0
_HEARTBEATS_PER_SECOND = 50  # ranks that rank 0 hears in a second, at most
_SILENCE = 5.0  # seconds without a word, when ranks are waiting: a process that is stopped, dead or cut off
_SUSPENDED = 4.0  # a tick that is so much too late: this process was stopped
_LAST_RESORT = 3  # times the deadline: then this rank's warden ends it
_CAUSE_WAIT = 2.0  # seconds in which a rank that ended reports why, after its connections were closed
_HISTORY = 50  # times of a phase that are kept
_SHOWN = 16  # processes that a line on a terminal names
_LONGEST_TRACEBACK = 4_000  # characters, in one datagram


def _report_processes(members: Sequence[Member]) -> None:
    """Logs the process and the host of each rank; a terminal gets those of the first ranks where there are many."""
    names = [f"rank {member.rank} is {member.pid} on {member.host}" for member in members]
    whole, threads = ", ".join(names), f"{torch.get_num_threads()} thread(s) each"
    log.info("Processes: %s; %s", listed(names, _SHOWN), threads, extra={failure.WHOLE: f"Processes: {whole}; {threads}"})


def _phase_hook(phase: str, part: int | None = None) -> Callable[..., None]:
    """Returns a hook that records that a phase begins; see `_begin_phase`."""

    def hook(self: "Watchdog", *args: object, **kwargs: object) -> None:
        self._begin_phase(phase, part)

    return hook


class Watchdog(Callback):
    """Ends a run that hangs, and reports which rank is at fault, on which host, and where it is.

    First-time work (connecting, compiling, the first batch), and writing checkpoints, may take `startup` seconds.

    Args:
        at_least: seconds without any progress before a run counts as hung; 0 or null: never.
        factor: or this many times the usual step, or the usual time of the current phase, if that is longer.
        startup: seconds for first-time work, and for writing checkpoints.
    """

    def __init__(self, at_least: float | None = 60.0, factor: float = 10.0, startup: float = 900.0) -> None:
        for name, value, fits in (("at_least", at_least or 0, (at_least or 0) >= 0), ("startup", startup, startup > 0)):
            if not fits:
                raise UserError(f"watchdog.{name} is a number of seconds, and not {value}.")
        if not factor >= 1:
            raise UserError(f"watchdog.factor is 1 at least, and not {factor}.")
        self.at_least, self.factor, self.startup = at_least or 0.0, factor, startup
        self._trainer: Trainer
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._channel: Channel | None = None
        self.folder: Path | None = None
        """The run's, which rank 0 has named; None before the ranks are connected."""
        self._dump: tuple[IO[bytes] | None, str] = (None, "")
        self.life: Path | None = None
        """The run's file of starts and stops (life.jsonl); set by the CLI."""
        self._warden: WardenProcess | None = None
        self._warden_due = 0.0
        self._spent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        self._batches = 0
        self._step_began: float | None = None
        # Phase, when it began, and how far the run is: replaced as a whole, so that the thread reads what belongs together.
        self._progress: tuple[str, float, tuple[int, int, int]] = ("start-up", time.monotonic(), (0, 0, 0))
        self._counted_from = 0.0  # no time before this counts as time without progress
        self._heartbeats: dict[int, tuple[float, Heartbeat]] = {}  # on rank 0: of each rank, when, and what
        self._pause = 0.0  # seconds between two heartbeats of a rank, if that is more than a tick
        self._rank_0_answered = 0.0  # on the others: when rank 0 did
        self._verdict: Verdict | None = None
        self._reports: dict[int, tuple[str, str]] = {}  # on rank 0: the place and the stacks of ranks at fault
        self._reached: set[int] = set()  # on rank 0: ranks that the longest packets reach, and that answer with one

    def __reduce__(self) -> tuple[type["Watchdog"], tuple[float, float, float]]:
        """Pickles the arguments only: a copy watches over nothing yet, as threads and connections can't be copied."""
        return type(self), (self.at_least, self.factor, self.startup)

    # What the main thread does ---------------------------------------------------------------------------------------

    def _begin_phase(self, phase: str, part: int | None = None) -> None:
        """Records that this rank makes progress: the main thread enters a phase.

        `part`: the phase's number within a micro-batch, if all ranks pass it equally often.
        """
        now = time.monotonic()
        before, since, (batches, at, done) = self._progress
        self._spent[before].append(now - since)
        self._progress = (phase, now, (batches, at, done + 1) if part in (None, at) else (batches, part, 0))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._begin_phase("forward")
        self._batches += 1
        phase, now, _ = self._progress
        self._progress = (phase, now, (self._batches, 0, 0))
        if self._warden is not None and now > self._warden_due:
            self._warden.start()  # by this thread: one that forks loader processes meanwhile would hand them its pipe
        if batch_idx % trainer.accumulate_grad_batches == 0:
            if self._step_began is not None:
                self._spent["step"].append(now - self._step_began)
            self._step_began = now

    on_fit_start = _phase_hook("start of the fit")
    on_train_start = _phase_hook("start of the training")
    on_train_epoch_start = _phase_hook("data, the first of the epoch")
    on_before_backward = _phase_hook("backward and gradient sync")
    on_before_optimizer_step = _phase_hook("optimiser")
    on_train_batch_end = _phase_hook("data")
    on_validation_start = on_test_start = on_predict_start = _phase_hook("validation, data", 1)
    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _phase_hook("validation", 1)
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _phase_hook("validation, data", 1)
    # Ranks have not all the same number of micro-batches to validate; from here on they are in step again.
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _phase_hook("end of the validation", 2)
    on_validation_end = on_test_end = on_predict_end = _phase_hook("data", 3)
    on_train_epoch_end = _phase_hook("end of the epoch", 4)
    on_train_end = _phase_hook("end of the training", 5)

    def start(self, trainer: Trainer) -> None:
        """Starts the watch. Called before the ranks are connected."""
        if not self.at_least or self._thread is not None:
            return
        self._trainer = trainer
        self.folder = self._channel = None
        self._heartbeats.clear()
        self._stopping.clear()
        self._progress = ("start-up", time.monotonic(), (0, 0, 0))
        self._batches, self._step_began = 0, None
        LOST_RANKS.clear()
        if not self._dump[1]:
            self._dump = stacks.open_dump()
        if trainer.world_size > 1:
            forbid_core_dumps()
        me = self._own_member()
        self._warden = WardenProcess(me.pid, me.started, me.dump, f"rank {me.rank} on {me.host}", launcher_pid())
        if trainer.state.fn == "fit" and me.rank == 0 and self.life is not None:
            self._warden.send(life=str(self.life.absolute()))  # in which it records how a fit ended, if the rank can't
        self._warden_due = time.monotonic() + _LATE_WARDEN
        if not is_supervised():  # else the supervisor reports their end, and the warden is there for silence alone
            self._warden.start()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._thread is None:
            return
        self._begin_phase("start-up")
        if trainer.world_size == 1 or not dist.is_initialized():
            self.folder = Path(trainer.default_root_dir)
            return
        channel = Channel(own_address())
        own = self._own_member(channel.address), channel.secret, trainer.default_root_dir
        gathered = [own] * trainer.world_size
        dist.all_gather_object(gathered, own)
        members, (_, secret, folder) = [member for member, _, _ in gathered], gathered[0]
        channel.set_members(members, secret)
        if self._rank == 0 and stage == "fit":
            _report_processes(members)
        self.folder, self._pause = Path(folder), len(members) / _HEARTBEATS_PER_SECOND
        self._rank_0_answered = now = time.monotonic()
        self._heartbeats = {member.rank: (now, self._heartbeat()) for member in members}
        others = [member.address for member in members if member.rank != self._rank]
        assert self._warden is not None
        file = f"{self.folder}/hang-rank{self._rank}.txt"
        self._warden.send(rank=self._rank, secret=channel.secret, addresses=others, file=file)
        self._channel = channel

    def _own_member(self, address: tuple[str, int] = ("", 0)) -> Member:
        """Returns this rank, as the others need to know it."""
        pid = os.getpid()
        return Member(self._rank, host(), machine_id(), pid, start_time(pid), address, self._dump[1])

    def stop(self) -> None:
        """Stops the watch: its thread, its connection and its warden. Can be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        if self._channel is not None:
            self._channel.wake()
        thread.join(2 * _TICK)
        if self._channel is not None and not thread.is_alive():
            self._channel.close()
        if self._warden is not None:
            self._warden.stop(_TICK)
            self._warden = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._channel is not None and isinstance(exception, torch.AcceleratorError):
            # NCCL's own thread may meet the same error first, and ends the process without a traceback.
            log.error("rank %d, %s: the device failed.\n%s", self._rank, host(), failure.message(exception))
        connected = self._channel is not None and isinstance(exception, Exception)  # else there is nobody to tell
        lost = connected and failure.kind(exception) == "lost"
        if connected and not (lost and LOST_RANKS.wait(_CAUSE_WAIT)):
            LOST_RANKS.unexplained = lost
            kind, what = ("died", "has lost another rank") if lost else ("fails", "has failed")
            cause = failure.cause_of(exception)
            text = f"rank {self._rank} on {host()} {what}: {cause.text}"
            trace = cause.traceback[-_LONGEST_TRACEBACK:]
            self._send_to_all(kind, rank=self._rank, text=text, where=cause.where, traceback=trace, failure=cause.kind)
        self.stop()

    # What the thread does --------------------------------------------------------------------------------------------

    @property
    def _members(self) -> list[Member]:
        """Returns all ranks; none before they are connected."""
        return self._channel.members if self._channel is not None else []

    def _run(self) -> None:
        """Runs in the thread: sends heartbeats, on rank 0 judges them, and ends the process when there is a verdict."""
        looked = spoke = time.monotonic()
        reported = -1  # the step that the supervisor knows
        while not self._stopping.is_set() and self._verdict is None:
            self._handle_messages(_TICK)
            now = time.monotonic()
            if now - looked > _TICK + _SUSPENDED:  # all were stopped (Ctrl-Z, a laptop's lid), or only this process
                self._counted_from = now
            looked = now
            beat = self._heartbeat()
            saved = checkpoints_of(self._trainer)
            if LOST_RANKS.exit_due(saved is not None and saved.writing) and not self._stopping.is_set():
                exit_after_loss(self._context())
            if self._warden is not None:
                if now > self._warden_due + _LATEST_WARDEN:  # no micro-batch has begun
                    self._warden.start()
                allowed = _LAST_RESORT * beat.allowed_own_work if self._channel is not None else math.inf
                self._warden.send(step=beat.step, allowed=allowed)
            if self._rank == 0 and beat.step != reported:  # for the record of a loss; one that is stopped reads nothing
                reported = beat.step
                tell_supervisor(socket.MSG_DONTWAIT, step=beat.step)
            if self._channel is None:
                if beat.is_stuck:
                    own = RankAtFault(self._rank, host(), beat, None, *stacks.own_stacks(self._dump[1]))
                    self._verdict = verdict_on([own])
            elif self._rank == 0:
                self._heartbeats[0] = now, beat
                self._judge(now)
            else:
                if beat.waits_too_long or now - spoke > self._pause:
                    self._channel.send(0, "beat", rank=self._rank, beat=asdict(beat))
                    spoke = now
                self._judge_rank_0(now, beat)
        if self._verdict is not None and not self._stopping.is_set():
            self._exit(self._verdict)

    @property
    def _rank(self) -> int:
        return self._trainer.global_rank

    def _allowed_seconds(self, phase: str) -> float:
        """Returns how long a phase may take, from the times that it and whole steps took so far."""
        if not (times := list(self._spent[phase])):
            return max(self.startup, self.at_least)
        typical = max(statistics.median(durations) for durations in (times, list(self._spent["step"])) if durations)
        return max(self.at_least, self.factor * typical)

    def _heartbeat(self) -> Heartbeat:
        """Returns this rank's progress; if it is overdue, also what it waits for."""
        phase, since, at = self._progress
        idle, allowed = time.monotonic() - max(since, self._counted_from), self._allowed_seconds(phase)
        own, collective = allowed, False
        known = flights.progress_by_group(flights.read_recorder()) if idle > self.at_least else {}
        if idle > allowed:  # a closer look, which costs more
            frames = stacks.main_frames()
            if stacks.in_debugger(frames):
                allowed = own = math.inf
            elif stacks.in_collective(frames) or any(flight.stage == Flight.STARTED for flight in known.values()):
                collective = True
            elif stacks.in_checkpoint(frames):
                phase, own = "checkpoint", max(allowed, self.startup)
        step, epoch = self._trainer.global_step, self._trainer.current_epoch
        return Heartbeat(at, phase, step, epoch, time.time() - idle, idle, allowed, own, collective, known)

    def _handle_messages(self, seconds: float) -> None:
        """Receives and handles messages for so many seconds, or until a verdict arrives."""
        if (channel := self._channel) is None:
            self._stopping.wait(seconds)
            return
        for message in channel.receive(seconds):
            match message["kind"]:
                case "beat":
                    self._heartbeats[message["rank"]] = time.monotonic(), heartbeat_from_dict(message["beat"])
                    channel.send(message["rank"], "here")
                case "here":
                    self._rank_0_answered = time.monotonic()
                case "testify":
                    place, text = stacks.own_stacks(self._dump[1])
                    channel.send(0, "testimony", rank=self._rank, place=place, stacks=text)
                case "testimony":
                    self._reports[message["rank"]] = message["place"], message["stacks"]
                case "fill":
                    channel.send_padded(0, "filled", message["size"], rank=self._rank)
                case "filled":
                    self._reached.add(message["rank"])
                case "died" | "fails" as kind:
                    early_start.take_launched(self._trainer.strategy.launcher)
                    details = (message.get(name, "") for name in ("where", "traceback", "failure"))
                    cause = Cause(message["text"], *details)
                    LOST_RANKS.note(message["rank"], cause, has_failed=kind == "fails")
                case "hang":
                    self._verdict = Verdict(**message["verdict"])
                    return

    # Who is at fault -------------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        """Sets the verdict on rank 0: the ranks that the others wait for, when some rank has waited too long."""
        if not any(beat.waits_too_long for _, beat in self._heartbeats.values()):
            return
        quiet = {rank: now - max(then, self._counted_from) for rank, (then, _) in sorted(self._heartbeats.items())}
        silent = [rank for rank, seconds in quiet.items() if seconds > _SILENCE + self._pause]
        if not silent and any(seconds > 2 * _TICK + self._pause for seconds in quiet.values()):
            return  # not heard any more, or just a datagram that got lost? The next looks will tell
        behind = flights.ranks_behind(beats := {rank: beat for rank, (_, beat) in self._heartbeats.items()})
        if not silent and flights.awaits_reports(beats.values()):
            return
        if silent or all(self._heartbeats[rank][1].is_stuck for rank in behind):
            others = [(self._members[rank], beat) for rank, beat in beats.items() if rank not in (silent or behind)]
            waiting = verdict.describe_phases(others)
            if silent:
                unheard = [(self._members[rank], beats[rank], now - self._heartbeats[rank][0]) for rank in silent]
                at_fault = [RankAtFault(member.rank, member.host, beat, seconds) for member, beat, seconds in unheard]
                self._verdict = verdict_on(at_fault, waiting)
            else:
                network = self._find_lost_packets()
                self._verdict = verdict_on(self._request_stacks(behind), waiting, network)

    def _find_lost_packets(self) -> str:
        """Sends the longest packets from rank 0 to each host, and returns which get lost, in a sentence, or ''."""
        assert self._channel is not None
        first = {member.machine: member for member in reversed(self._members)}
        first.pop(self._members[0].machine)
        missing = {member.rank: member.host for member in first.values()}
        size = mtu()
        self._reached.clear()
        end = time.monotonic() + 2 * _TICK
        while missing and time.monotonic() < end:
            for rank in missing:
                self._channel.send_padded(rank, "fill", size)
            self._handle_messages(_TICK / 4)
            missing = {rank: host for rank, host in missing.items() if rank not in self._reached}
        if not missing:
            return ""
        hosts = ", ".join(missing[rank] for rank in sorted(missing)[: verdict.SHOWN])
        return f"Packets of {size:,} bytes get lost between {self._members[0].host} and {hosts}, and short ones do not"

    def _request_stacks(self, ranks: list[int]) -> list[RankAtFault]:
        """Requests the stacks of the first ranks at fault, waits for the answers, and returns the descriptions of all."""
        assert self._channel is not None
        self._reports.clear()
        awaited = {*ranks[: verdict.SHOWN]}
        for rank in awaited:  # this one, too
            self._channel.send(rank, "testify")
        end = time.monotonic() + 3 * _TICK
        while awaited - self._reports.keys() and time.monotonic() < end:
            self._handle_messages(_TICK / 4)
        described = []
        for rank in ranks:
            place, text = self._reports.get(rank, ("", ""))
            described.append(RankAtFault(rank, self._members[rank].host, self._heartbeats[rank][1], place=place, stacks=text))
        return described

    def _judge_rank_0(self, now: float, beat: Heartbeat) -> None:
        """Sets the verdict on another rank than 0: this one has waited too long, and rank 0 does not answer."""
        quiet = now - max(self._rank_0_answered, self._counted_from)
        # The seconds for which this rank has asked each tick: of many, only from when it waits too long.
        asking = now - self._counted_from if self._pause <= _TICK else beat.idle - beat.allowed
        if beat.waits_too_long and min(quiet, asking) > _SILENCE + 2 * _TICK:
            silent = RankAtFault(0, self._members[0].host, replace(beat, phase=""), quiet)
            self._verdict = verdict_on([silent], verdict.describe_phases([(self._members[self._rank], beat)]))

    # The end ---------------------------------------------------------------------------------------------------------

    def _exit(self, judged: Verdict) -> None:
        """Sends the verdict to the warden and, from rank 0, to all ranks; reports it and ends this process."""
        if self._warden is not None:
            why, step = judged.text.splitlines()[0], self._trainer.global_step
            self._warden.send(why=why, kind="hang", where=judged.place, step=step, ending=True)
        if self._rank == 0 or 0 in judged.silent:
            self._send_to_all("hang", judged.silent, verdict=asdict(judged))
        verdict.report_and_exit(judged, self._context())

    def _context(self) -> RankContext:
        me = self._own_member()
        return RankContext(self._members or [me], me, self._heartbeat(), self.folder, self._trainer.local_rank, self._warden)

    def _send_to_all(self, kind: str, skip: Iterable[int] = (), **content: object) -> None:
        """Sends a message to all other ranks but `skip`, three times: a datagram may get lost."""
        for _ in range(3 if self._channel is not None else 0):
            for member in self._members:
                if self._channel is not None and member.rank not in (self._rank, *skip):
                    self._channel.send(member.rank, kind, **content)
            time.sleep(0.1)
