"""Turns a hang into a named rank, its stacks and an exit, within a deadline that follows from the run's own step times.

The main thread notes its progress in memory. A thread beside it reports to rank 0's once in a while; when a rank has made no
progress for too long, rank 0's finds the one that all wait for: a rank that is not heard any more, or else the one that is
furthest behind. Then every rank writes its stacks into the run's folder, one on each host reports whose fault it is, and all
end with exit code 75, 'try again': torchrun and Slurm can start the run anew, and it resumes from its checkpoint.
"""

import logging
import math
import os
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from project import early_start
from project.cluster.interfaces import mtu, own_address
from project.cluster.place import host
from project.errors import UserError
from project.survive import failure
from project.survive.abort import exit_on_abort
from project.survive.agent import agent
from project.survive.checkpoints import checkpoints_of
from project.survive.hang import flights, stacks, verdict
from project.survive.hang.beside import Beside
from project.survive.hang.heartbeats import Channel, Flight, Heartbeat, Member, machine, unpacked
from project.survive.hang.leaving import Scene
from project.survive.hang.told import due as exit_due
from project.survive.hang.told import end as exit_after_loss
from project.survive.hang.verdict import Guilty, Verdict
from project.survive.hang.warden import started
from project.survive.news import NEWS

log = logging.getLogger(__name__)

_TICK = 1.0  # seconds between two looks
_HEARD = 50  # ranks that rank 0 hears in a second, at most
_SILENT = 5.0  # seconds without a word, when ranks are waiting: a process that is stopped, dead or cut off
_SUSPENDED = 4.0  # a tick that is so much too late: this process was stopped
_LAST_RESORT = 3  # times the deadline: then this rank's warden ends it
_NEWS = 2.0  # seconds in which who ended says why, after its connections were closed
_HISTORY = 50  # times of a phase that are kept


def _marks(phase: str, part: int | None = None) -> Callable[..., None]:
    """Returns a hook that notes that a phase begins; `part` is its place within a micro-batch, if it is the same on all
    ranks.
    """

    def hook(self: "Watchdog", *args: Any, **kwargs: Any) -> None:
        self._begin(phase, part)

    return hook


class Watchdog(Callback):
    """Ends a run in which nothing moves any more, and says which rank is at fault, on which host, and where it is.

    What happens for the first time in a run (connecting, compiling, the first batch), and the writing of checkpoints, has the
    time that `startup` allows.

    Args:
        at_least: seconds without any progress before a run counts as hung; 0 or null: never.
        factor: or so many times the usual step, or the usual time of what it is doing, if that is longer.
        startup: seconds for what is done for the first time, and for writing checkpoints.
    """

    def __init__(self, at_least: float | None = 60.0, factor: float = 10.0, startup: float = 900.0) -> None:
        for name, value, fits in (("at_least", at_least or 0, (at_least or 0) >= 0), ("startup", startup, startup > 0)):
            if not fits:
                raise UserError(f"watchdog.{name} is a number of seconds, and not {value}.")
        if not factor >= 1:
            raise UserError(f"watchdog.factor is 1 at least, and not {factor}.")
        self.at_least, self.factor, self.startup = at_least or 0.0, factor, startup
        self._trainer: Any = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._channel: Channel | None = None
        self._folder: Path | None = None
        self._dump: tuple[Any, str] = (None, "")
        self.life: Path | None = None
        """The file of starts and stops, from who writes it."""
        self._warden: Beside | None = None
        self._spent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        self._batches = 0
        self._step_began: float | None = None
        # Phase, when it began, and how far the run is: replaced as a whole, so that the thread reads what belongs together.
        self._now: tuple[str, float, tuple[int, int, int]] = ("start-up", time.monotonic(), (0, 0, 0))
        self._floor = 0.0  # no time before this counts as time without progress
        self._heard: dict[int, tuple[float, Heartbeat]] = {}  # on rank 0: of each rank, when, and what
        self._answered = 0.0  # on the others: when rank 0 did
        self._asking_since = 0.0
        self._verdict: Verdict | None = None
        self._testimonies: dict[int, Guilty] = {}
        self._filled: set[int] = set()  # on rank 0: to whom the longest packets get, and back

    def __reduce__(self) -> tuple[type["Watchdog"], tuple[float, float, float]]:
        """Pickles the arguments only: a copy watches over nothing yet, as threads and connections can't be copied."""
        return type(self), (self.at_least, self.factor, self.startup)

    # What the main thread does ---------------------------------------------------------------------------------------

    def _begin(self, phase: str, part: int | None = None) -> None:
        now = time.monotonic()
        before, since, (batches, at, done) = self._now
        self._spent[before].append(now - since)
        self._now = (phase, now, (batches, at, done + 1) if part in (None, at) else (batches, part, 0))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin("forward")
        self._batches += 1
        phase, now, _ = self._now
        self._now = (phase, now, (self._batches, 0, 0))
        if batch_idx % trainer.accumulate_grad_batches == 0:
            if self._step_began is not None:
                self._spent["step"].append(now - self._step_began)
            self._step_began = now

    on_fit_start = _marks("start of the fit")
    on_train_start = _marks("start of the training")
    on_train_epoch_start = _marks("data, the first of the epoch")
    on_before_backward = _marks("backward and gradient sync")
    on_before_optimizer_step = _marks("optimiser")
    on_train_batch_end = _marks("data")
    on_validation_start = on_test_start = on_predict_start = _marks("validation, data", 1)
    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _marks("validation", 1)
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _marks("validation, data", 1)
    # Ranks have not all the same number of micro-batches to validate; from here on they are in step again.
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _marks("end of the validation", 2)
    on_validation_end = on_test_end = on_predict_end = _marks("data", 3)
    on_train_epoch_end = _marks("end of the epoch", 4)
    on_train_end = _marks("end of the training", 5)

    def start(self, trainer: Trainer) -> None:
        """Starts the watch. Called before the ranks are connected."""
        agent()
        if not self.at_least or self._thread is not None:
            return
        self._trainer = trainer
        self._folder = self._channel = None
        self._heard.clear()
        self._stopping.clear()
        self._now = ("start-up", time.monotonic(), (0, 0, 0))
        self._batches, self._step_began = 0, None
        NEWS.clear()
        if not self._dump[1]:
            self._dump = stacks.open_dump()
        if trainer.world_size > 1:
            exit_on_abort()
        self._warden = Beside(self._self())
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._thread is None:
            return
        self._begin("start-up")
        if trainer.world_size == 1 or not dist.is_initialized():
            self._folder = Path(trainer.default_root_dir)
            self._tell_of_life()
            return
        channel = Channel(own_address())
        gathered: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(gathered, (self._self(channel.address), channel.secret, trainer.default_root_dir))
        members, secrets, folders = zip(*gathered, strict=True)
        channel.join(list(members), secrets[0])
        self._folder = Path(folders[0])
        self._answered = now = time.monotonic()
        self._heard = {member.rank: (now, self._beat()) for member in members}
        others = [member.address for member in members if member.rank != self._rank]
        assert self._warden is not None
        file = f"{self._folder}/hang-rank{self._rank}.txt"
        self._warden.tell(rank=self._rank, secret=channel.secret, addresses=others, file=file)
        self._tell_of_life()
        self._channel = channel

    def _tell_of_life(self) -> None:
        """Sends the warden the file in which it notes how the run ended, if rank 0 can't."""
        if self._rank == 0 and self.life is not None and self._warden is not None:
            self._warden.tell(life=str(self.life.absolute()))

    def _self(self, address: tuple[str, int] = ("", 0)) -> Member:
        pid = os.getpid()
        return Member(self._rank, host(), machine(), pid, started(pid), address, self._dump[1])

    def stop(self) -> None:
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
            self._warden.dismiss(_TICK)
            self._warden = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._channel is not None and isinstance(exception, torch.AcceleratorError):
            # NCCL's own thread may meet the same error first, and ends the process without a traceback.
            log.error("rank %d, %s: the device failed.\n%s", self._rank, host(), failure.message(exception))
        connected = self._channel is not None and isinstance(exception, Exception)  # else there is nobody to tell
        lost = connected and failure.kind(exception) == "lost"
        if connected and not (lost and NEWS.wait(_NEWS)):
            NEWS.silence = lost
            kind, what = ("died", "has lost another rank") if lost else ("fails", "has failed")
            self._tell_all(kind, rank=self._rank, text=f"rank {self._rank} on {host()} {what}: {failure.in_short(exception)}")
        self.stop()

    # What the thread does --------------------------------------------------------------------------------------------

    @property
    def _members(self) -> list[Member]:
        return self._channel.members if self._channel is not None else []

    def _watch(self) -> None:
        looked = spoke = time.monotonic()
        while not self._stopping.is_set() and self._verdict is None:
            self._listen(_TICK)
            now = time.monotonic()
            if now - looked > _TICK + _SUSPENDED:  # all were stopped (Ctrl-Z, a laptop's lid), or only this process
                self._floor = now
            looked = now
            beat = self._beat()
            agent().look()
            saved = checkpoints_of(self._trainer)
            if exit_due(saved is not None and saved.writing) and not self._stopping.is_set():
                exit_after_loss(self._scene(), self._warden)
            if self._channel is not None and self._warden is not None:
                self._warden.allow(_LAST_RESORT * beat.own)
            if self._channel is None:
                if beat.stuck:
                    self._verdict = Verdict([self._me(beat)])
            elif self._rank == 0:
                self._heard[0] = now, beat
                self._judge(now)
            else:
                if beat.waits or now - spoke > len(self._members) / _HEARD:
                    self._channel.send(0, "beat", rank=self._rank, beat=asdict(beat), asking=beat.idle > beat.allowed / 2)
                    spoke = now
                self._miss_rank_0(now, beat)
        if self._verdict is not None and not self._stopping.is_set():
            self._end(self._verdict)

    @property
    def _rank(self) -> int:
        return int(self._trainer.global_rank)

    def _allowed(self, phase: str) -> float:
        if not (times := list(self._spent[phase])):
            return max(self.startup, self.at_least)
        typical = max(statistics.median(durations) for durations in (times, list(self._spent["step"])) if durations)
        return max(self.at_least, self.factor * typical)

    def _beat(self) -> Heartbeat:
        phase, since, at = self._now
        idle, allowed = time.monotonic() - max(since, self._floor), self._allowed(phase)
        own, collective = allowed, False
        known = flights.flights(flights.recorded()) if idle > self.at_least else {}
        if idle > allowed:  # a closer look, which costs more
            frames = stacks.main_frames()
            if stacks.debugged(frames):
                allowed = own = math.inf
            elif stacks.in_collective(frames) or any(flight.stage == Flight.STARTED for flight in known.values()):
                collective = True
            elif stacks.in_checkpoint(frames):
                phase, own = "checkpoint", max(allowed, self.startup)
        step, epoch = self._trainer.global_step, self._trainer.current_epoch
        return Heartbeat(at, phase, step, epoch, time.time() - idle, idle, allowed, own, collective, known)

    def _listen(self, seconds: float) -> None:
        if self._channel is None:
            self._stopping.wait(seconds)
            return
        for message in self._channel.receive(seconds):
            if message["kind"] == "beat":
                self._heard[message["rank"]] = time.monotonic(), unpacked(message["beat"])
                if message["asking"]:
                    self._channel.send(message["rank"], "here")
            elif message["kind"] == "here":
                self._answered = time.monotonic()
            elif message["kind"] == "testify":
                self._channel.send(0, "testimony", guilty=self._me(self._beat()).packed())
            elif message["kind"] == "testimony":
                testimony = verdict.guilty(message["guilty"])
                self._testimonies[testimony.rank] = testimony
            elif message["kind"] == "fill" and self._channel is not None:
                self._channel.fill(0, "filled", message["size"], rank=self._rank)
            elif message["kind"] == "filled":
                self._filled.add(message["rank"])
            elif message["kind"] == "died":
                self._outlive_launched()
                NEWS.of_death(message["rank"], message["text"])
            elif message["kind"] == "fails":
                self._outlive_launched()
                NEWS.of_failure(message["rank"], message["text"])
            elif message["kind"] == "hang":
                self._verdict = verdict.verdict(message["verdict"])
                return

    def _outlive_launched(self) -> None:
        """Takes the launched ranks from Lightning, which looks at them every 5 s and, where one has failed, kills this one with
        a signal: before it could end by itself, with a code of its own.
        """
        launched = getattr(self._trainer.strategy.launcher, "procs", [])
        early_start.processes.extend(launched)
        launched.clear()

    # Who is at fault -------------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        """Finds, on rank 0, the ranks that are waited for, when some rank has waited too long."""
        if not any(beat.waits for _, beat in self._heard.values()):
            return
        between = len(self._members) / _HEARD  # seconds between two heartbeats, if that is more than a tick
        quiet = {rank: now - max(then, self._floor) for rank, (then, _) in sorted(self._heard.items())}
        silent = [rank for rank, seconds in quiet.items() if seconds > _SILENT + between]
        if not silent and any(seconds > 2 * _TICK + between for seconds in quiet.values()):
            return  # not heard any more, or just a datagram that got lost? The next looks will tell
        behind = flights.behind(beats := {rank: beat for rank, (_, beat) in self._heard.items()})
        if not silent and flights.undecided(beats.values()):
            return
        if silent or all(self._heard[rank][1].stuck for rank in behind):
            network = "" if silent else self._swallowed()
            guilty = [self._silent(rank, now) for rank in silent] or self._testimony(behind)
            others = [(self._members[rank], beat) for rank, (_, beat) in self._heard.items() if rank not in (silent or behind)]
            where = "" if silent else flights.awaiting(beats, behind)
            self._verdict = Verdict(guilty, "; ".join(filter(None, (verdict.waiting(others), where))), network)

    def _swallowed(self) -> str:
        """Returns, on rank 0, whether the ranks wait because the longest packets get lost between the hosts."""
        assert self._channel is not None
        first = {member.machine: member for member in reversed(self._members)}
        first.pop(self._members[0].machine)
        missing = {member.rank: member.host for member in first.values()}
        size = mtu()
        self._filled.clear()
        end = time.monotonic() + 2 * _TICK
        while missing and time.monotonic() < end:
            for rank in missing:
                self._channel.fill(rank, "fill", size)
            self._listen(_TICK / 4)
            missing = {rank: host for rank, host in missing.items() if rank not in self._filled}
        if not missing:
            return ""
        hosts = ", ".join(missing[rank] for rank in sorted(missing)[: verdict.SHOWN])
        return f"Packets of {size:,} bytes get lost between {self._members[0].host} and {hosts}, and short ones do not"

    def _silent(self, rank: int, now: float) -> Guilty:
        then, beat = self._heard[rank]
        return Guilty(rank, self._members[rank].host, beat, now - then)

    def _testimony(self, ranks: list[int]) -> list[Guilty]:
        """Returns what the ranks at fault report themselves, as far as it is shown."""
        assert self._channel is not None
        self._testimonies = {0: self._me(self._heard[0][1])} if 0 in ranks else {}
        awaited = {rank for rank in ranks[: verdict.SHOWN] if rank != 0}
        for rank in awaited:
            self._channel.send(rank, "testify")
        end = time.monotonic() + 3 * _TICK
        while awaited - self._testimonies.keys() and time.monotonic() < end:
            self._listen(_TICK / 4)
        unheard = {rank: Guilty(rank, self._members[rank].host, self._heard[rank][1]) for rank in ranks}
        return [self._testimonies.get(rank, unheard[rank]) for rank in ranks]

    def _miss_rank_0(self, now: float, beat: Heartbeat) -> None:
        """Judges rank 0 from another rank: this rank has waited too long, and rank 0 does not even answer."""
        if beat.idle <= beat.allowed / 2:
            self._asking_since = now
        quiet = now - max(self._answered, self._asking_since, self._floor)
        if beat.waits and quiet > _SILENT + 2 * _TICK:
            unknown = replace(beat, phase="")
            me = self._members[self._rank]
            self._verdict = Verdict([Guilty(0, self._members[0].host, unknown, quiet)], verdict.waiting([(me, beat)]))

    def _me(self, beat: Heartbeat) -> Guilty:
        return Guilty(self._rank, host(), beat).testify(self._dump[1])

    # The end ---------------------------------------------------------------------------------------------------------

    def _end(self, judged: Verdict) -> None:
        brief = judged.brief() if judged.network else judged
        if self._warden is not None:
            self._warden.tell(why=str(brief).splitlines()[0])
            self._warden.ends()
        if self._rank == 0 or 0 in judged.silent:
            self._tell_all("hang", judged.silent, verdict=brief.packed())
        verdict.end(judged, self._scene())

    def _scene(self) -> Scene:
        me = self._self()
        return Scene(self._members or [me], me, self._beat(), self._folder, self._trainer.local_rank)

    def _tell_all(self, kind: str, but: Iterable[int] = (), **content: Any) -> None:
        """Sends a message to all members, three times: a datagram may get lost."""
        for _ in range(3 if self._channel is not None else 0):
            for member in self._members:
                if self._channel is not None and member.rank not in (self._rank, *but):
                    self._channel.send(member.rank, kind, **content)
            time.sleep(0.1)
