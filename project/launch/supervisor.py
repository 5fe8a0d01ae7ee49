"""The supervisor: the process above the ranks. It starts them, and starts them again when one of them is lost.

Only where `recover.restarts` is set: `python -m project fit` becomes the supervisor, loads neither torch nor the user's code,
and lives as long as the run. Under plain Python it is above all ranks, under torchrun and srun above one. Its first child, the
fork server (`launch/fork_server.py`), loads PyTorch and this project once, and forks the ranks, those of the next start before
they are needed. They keep the state to resume from in a folder in memory that belongs to the supervisor. See docs/faults.md.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from datetime import datetime
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from typing import cast

from project.cluster.place import MEMORY, host, node_of
from project.cluster.signed import Message
from project.errors import LEFT_OUT, TRY_AGAIN
from project.launch.children import Children
from project.launch.early_start import LAUNCHERS, early_settings, free_port
from project.launch.losses import STRIKES, Losses, Strikes
from project.launch.membership import Membership
from project.launch.memory_folder import make_folder_in_memory
from project.launch.orphans import LAUNCHER
from project.launch.peers import Peers
from project.survive.life import add_stop, add_to_log, start_report
from project.survive.requeue import REQUEUE
from project.survive.signals import ENDING

SOCKET = "PROJECT_FORK_SERVER"
"""The environment variable with the fork server's socket, and that of the ranks."""
SUPERVISED = "PROJECT_SUPERVISED"
"""The environment variable with the name of a supervised run, which stays when its ranks are started again."""
PORT = "PROJECT_SUPERVISOR_PORT"
"""The environment variable with the port at which the supervisor of the first rank listens, where each rank has its own."""
REPLACES_HOSTS = "PROJECT_REPLACES_HOSTS"
"""The environment variable that Ray's driver sets where it can start the ranks again on other hosts, when they have ended."""
_ENGINES = {REPLACES_HOSTS, "KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID"}
"""Environment variables of engines that may start a run of one host on another."""
_SPARES_AFTER = 2.0  # seconds from a rank's first message: ranks that are being set up need the cores themselves
_GRACE = 20.0  # seconds that the other ranks have to end by themselves when one has failed
_LOOK = 0.5  # seconds between two looks whether the fork server lives
_ACKNOWLEDGEMENT, _ANSWER = 10.0, 90.0  # seconds that another supervisor waits for the first one's roll call, and its decision
_LONGEST_MESSAGE = 1 << 16


def limits_of(words: list[str]) -> tuple[int, int]:
    """Returns `recover.restarts` and `recover.strikes` of a command line; 0 restarts where this is no supervisor."""
    variables = os.environ.keys()
    by_engine = "TORCHELASTIC_RUN_ID" in variables or "SLURM_STEP_ID" in variables
    if words[:1] == ["fit"] and SUPERVISED not in variables and (by_engine or LAUNCHERS.isdisjoint(variables)):
        settings = early_settings(words, "recover", "restarts", "strikes")
        with suppress(ValueError):  # of what is no number, reported by the parser
            return max(0, int(str(settings.get("restarts") or 0))), int(str(settings.get("strikes") or STRIKES))
    return 0, STRIKES


class Supervisor:
    """Starts the ranks of a run, and starts them again, `restarts` times, when one of them is lost.

    Under plain Python it has all ranks of the run. Where an engine starts each rank by itself, it has one, and the supervisor
    of the first rank decides for all (`launch/peers.py`).
    """

    def __init__(
        self, restarts: int, strikes: int, memory: Path | None, rank: int, world_size: int, several_hosts: bool
    ) -> None:
        """Starts the fork server. `rank`: its first rank; `world_size`: where an engine starts the ranks, their number."""
        self._memory, self._rank = memory, rank
        self._numbers: dict[str, str] = {}  # of the ranks, where they are no longer those that the engine gave them
        self._host, self._until, self._spares_at = host(), inf, inf
        self._attempt = 0
        self._requested: int | None = None  # the first signal that asked the run to stop, here or in a rank
        self._has_failed = False  # whether a rank has reported an error, after which the others are sent a signal from here
        self._reason = ""  # why all ranks end by themselves, to be started again
        self._step: int | None = None  # of rank 0, up to a second ago
        self._life: Path | None = None  # the file in which rank 0 records the run's starts and stops
        self._losses, self._strikes = Losses(restarts), Strikes(strikes)
        self._end: int | None = None  # the exit code, once the run is given up
        self._unanswered = ""  # why this supervisor waits for the decision of the first one
        self._small_builds: set[str] = set()  # the ranks that say that making their objects needs little
        self._peers = Peers(rank == 0 and world_size > 1, several_hosts)
        self._members = Membership(world_size, self._peers)
        self._children = Children()
        REQUEUE.newest = self._newest_checkpoint
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._server, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._facts, ranks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"  # where no engine has a better one
        inherited = [server.fileno(), ranks.fileno()]
        environment = {**os.environ, SUPERVISED: name, LAUNCHER: str(os.getppid()), SOCKET: " ".join(map(str, inherited))}
        environment |= {MEMORY: str(memory)} if memory else {}
        environment |= {PORT: str(self._peers.port)} if world_size > 1 else {}
        environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() leaves CUDA to the ranks
        self._children.start_server([sys.executable, *sys.orig_argv[1:]], environment, inherited)
        server.close()
        ranks.close()
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: object) -> None:
        """Passes a signal on to the ranks; before there are any, to the fork server."""
        self._requested = self._requested or number
        self._children.signal(number)

    def run(self) -> int:
        """Runs the ranks to their end, and returns the exit code."""
        if "ready" not in receive(self._server):
            code = self._children.server.wait()  # a wrong configuration, say, which it has reported
            return code if code >= 0 else 128 - code
        while self._run_once():
            self._attempt += 1
        self._peers.send(done=True)
        self._server.close()  # by which the fork server ends
        self._children.server.wait()
        self._children.end_spares()
        if self._end is not None:
            if self._life is not None:
                start_report(self._life)
            return self._end
        failed = [rank.code for rank in self._children.ranks if rank.code]
        by_themselves = [code for code in failed if code < 128 and code != TRY_AGAIN]
        return next(iter(by_themselves or failed), 0)

    def _run_once(self) -> bool:
        """Starts the ranks, and waits until all have ended. Returns whether they are to be started again."""
        if (pids := self._order(attempt=self._attempt, port=free_port(), numbers=self._numbers).get("pids")) is None:
            self._report("The process from which ranks are forked has ended: no rank is started again.")
            self._end = TRY_AGAIN
            return False
        self._children.add_ranks(pids, self._rank)
        if self._requested is not None:  # the signal came while there was no rank
            self._pass_on(self._requested, None)
        self._until, self._unanswered, self._spares_at = inf, "", inf
        self._has_failed, self._reason, self._step = False, "", None
        while self._children.alive or (self._unanswered and not self._peers.is_alone):
            ready = self._select(min(self._until, self._spares_at) - time.monotonic())
            if time.monotonic() > self._spares_at:
                self._request_spares()
                ready, self._spares_at = [], inf
            restart = self._answer(ready)
            if restart is not None:
                return restart
            for rank in self._children.reap():
                loss = rank.describe_loss(self._host, self._reason)
                if loss and not self._unanswered:
                    where = self._host if rank.killed_by else ""
                    if self._rank == 0:
                        return self._decide(loss, where)
                    self._peers.send(lost=loss, where=where, attempt=self._attempt)
                    self._unanswered = "another one has failed"
                    if self._until == inf:  # else the roll has been called
                        self._until = time.monotonic() + _ACKNOWLEDGEMENT
                elif rank.code and self._until == inf:
                    self._until = time.monotonic() + _GRACE
            if time.monotonic() > self._until:
                if numbers := self._children.living_numbers:
                    why = self._unanswered or "another one has failed"
                    self._report(f"Ranks still running long after {why}: {numbers}. They are ended.")
                    self._kill()
                break
        self._end = TRY_AGAIN if self._unanswered else None
        return False

    def _order(self, **order: object) -> Message:
        """Gives the fork server an order, and returns its answer; {} where it has ended."""
        with suppress(OSError):
            self._server.send(json.dumps(order).encode())
        while not wait([self._server], _LOOK):  # what the user's code has forked there may hold the other end
            if self._children.server.poll() is not None:
                return {}
        return receive(self._server)

    def _select(self, seconds: float) -> Container[object]:
        """Waits for a message, a signal or a child's end, or so long; returns what is ready to be read."""
        ready = wait([self._facts, self._wake, *self._peers.inputs()], None if seconds == inf else seconds)
        if self._wake in ready:
            os.read(self._wake, 1 << 12)
        return ready

    def _answer(self, ready: Container[object]) -> bool | None:
        """Handles messages. Returns whether the ranks are to be started again, where one of them decides that."""
        self._read_facts()
        received = [*self._peers.messages(ready)]
        if self._rank == 0:
            reports = [message for message in received if "lost" in message and message["attempt"] == self._attempt]
            losses = [(message["lost"], message["where"]) for message in reports]
            for gone in [message["gone"] for message in received if "gone" in message]:
                if self._members.can_lose(gone):
                    losses.append((f"Rank {gone} on {self._peers.hosts[gone]} is lost, with its supervisor.", ""))
            return self._decide(*losses[0]) if losses else None
        for message in received:
            if "roll" in message:
                self._peers.send(roll=message["roll"], rank=self._rank)
                self._until = time.monotonic() + _ANSWER
            elif "gone" in message:
                self._unanswered = "the supervisor of rank 0 is gone"
                self._until = min(self._until, time.monotonic() + _ANSWER)
        decisions = [message for message in received if "restart" in message or "end" in message]
        if decisions:
            self._kill()
        for message in decisions:  # the ranks may have been lost again meanwhile
            if not self._follow(message):
                return False
        if decisions and self._peers.is_alone:  # who has decided is gone, too
            self._end = TRY_AGAIN
            return False
        return bool(decisions) or None

    def _read_facts(self) -> None:
        """Handles what the ranks of this start have sent."""
        while wait([self._facts], 0.0) and (facts := receive(self._facts)):
            if facts.get("attempt") != self._attempt:
                continue
            if not self._children.spares and facts.keys().isdisjoint(("reported", "step")) and self._requested is None:
                self._spares_at = min(self._spares_at, time.monotonic() + _SPARES_AFTER)
            self._life = Path(facts["life"]) if "life" in facts else self._life
            self._small_builds |= {facts["small"]} if "small" in facts else set()
            self._reason = facts.get("reason", self._reason)
            self._step = facts.get("step", self._step)
            self._has_failed |= "reported" in facts
            if "signal" in facts and not self._has_failed:
                self._requested = self._requested or facts["signal"]
            for rank in self._children.alive if "reported" in facts else ():
                if rank.number != facts["reported"]:  # an error that need not be repeated
                    os.kill(rank.pid, signal.SIGTERM)
            if "secret" in facts:
                place = facts["address"], facts["port"]
                self._peers.connect(*place, facts["secret"], facts["ranks"] - 1, self._rank, self._host)

    def _follow(self, decision: Message) -> bool:
        """Follows a decision of the first supervisor. Returns whether the ranks are to be started again."""
        missing = {*decision.get("without", ())}
        if "end" in decision or self._rank in missing:
            self._end = LEFT_OUT if self._host in decision.get("left_out", ()) else TRY_AGAIN
            if self._rank in missing:
                why = "it has lost ranks too often (recover.strikes)" if self._end == LEFT_OUT else "it did not answer"
                self._report(f"The run resumes without {self._host}: {why}.")
            return False
        self._attempt = decision["restart"] - 1
        if missing:
            self._rank, self._numbers = self._members.renumber(missing, self._rank)
            self._children.end_spares()  # which have the old numbers, and may have made their objects for as many ranks
        return True

    def _request_spares(self) -> None:
        """Has the fork server fork the ranks of the next start, so that a loss need not wait for that."""
        build = len(self._small_builds) == len(
            self._children.ranks
        )  # the objects of the configuration, where that needs little
        self._children.spares = self._order(spares=True, build=build, numbers=self._numbers).get("spares", [])

    def _decide(self, loss: str, where: str) -> bool:
        """Ends all ranks, as one is lost; returns whether they are started again, and has the other supervisors do the same.

        `where`: the host on which it was killed, if it was.
        """
        missing, reports = self._members.call_roll(self._attempt)
        if not where and reports:  # of a rank that was killed: the others have lost it
            loss, where = reports[0]
        has_enough = self._members.has_enough(missing)
        hosts = self._peers.hosts
        silent = sorted({hosts[rank] for rank in missing if rank in hosts})
        if unnamed := [name for name in silent if f" on {name} is lost" not in loss]:
            loss = f"{loss} No answer from {', '.join(unnamed)}."
        self._kill()
        if self._life is not None:
            kind = "hang" if self._reason else "lost"
            add_stop(self._life, self._children.ranks[0].pid, self._step, "killed", loss, kind=kind)
        culprits = silent or ([where] if where else [])
        refusal = self._losses.add(loss, self._newest_state())
        if self._requested is not None or not has_enough or self._losses.is_repeated:  # or this host may be cut off
            culprits = []
        left_out, needed = list[str](), list[str]()
        has_choice = {*hosts.values()} - {self._host} or _ENGINES & os.environ.keys()
        for bad, times in self._strikes.add(culprits, self._life).items():
            loss += f" {bad} has lost ranks {times} times within an hour." if has_choice else ""
            struck = self._members.ranks_to_leave_out(bad, missing)
            missing = missing | struck
            (left_out if struck else needed).append(bad)
        if needed and REPLACES_HOSTS in os.environ:
            self._report(f"{loss} All ranks end: Ray starts them again without {', '.join(needed)}.")
            decision: Message = {"end": True, "left_out": needed}
        elif self._may_restart(loss, refusal, missing, has_enough, needed):
            decision = {"restart": self._attempt + 1, "without": sorted(missing), "left_out": left_out}
        else:
            decision = {"end": True}
        self._peers.send(**decision)
        return self._follow(decision)

    def _kill(self) -> None:
        """Kills all ranks, and reads what they have sent till then. Ends this process where one of them can't be killed."""
        if not self._children.kill():
            numbers = self._children.living_numbers
            self._report(f"Ranks can't be killed: {numbers}. They wait for a disk or a device in the kernel.")
            raise SystemExit(TRY_AGAIN)
        self._read_facts()

    def _newest_checkpoint(self) -> Path | None:
        return max(self._life.parent.glob("checkpoints/step-*.ckpt"), default=None) if self._life else None

    def _newest_state(self) -> str:
        """Returns the name of the run's newest state in memory or on disk, by which it is known whether it makes progress."""
        folders = [self._memory, self._life and self._life.with_name("checkpoints")]
        return max((path.name for folder in folders if folder for path in folder.glob("step-*.json")), default="")

    def _may_restart(self, loss: str, refusal: str, missing: set[int], has_enough: bool, bad_hosts: Sequence[str]) -> bool:
        """Returns whether the ranks are started again after a loss, and reports it.

        Args:
            loss: the loss, in sentences.
            refusal: why another start is not worth while, or ''.
            missing: ranks that the run resumes without.
            has_enough: whether the supervisors of all ranks that are needed have answered.
            bad_hosts: hosts that have lost too many ranks, and that the run can't do without.
        """
        if self._requested is not None:
            refusal = f"The run was to stop ({signal.Signals(self._requested).name})"
        if not refusal and self._children.server.poll() is not None:
            refusal = "The process from which ranks are forked has ended"
        if not has_enough:
            self._report(f"{loss} Not all supervisors are there: not restarted here. The same command resumes the run.")
            return False
        nodes = [self._members.slurm_node(host) for host in bad_hosts]
        is_excluded, advice = REQUEUE.exclude(nodes), ""
        if is_excluded:
            advice = f" When this run requeues the job, Slurm starts it without {', '.join(nodes)}."
        elif bad_hosts and "KUBERNETES_SERVICE_HOST" in os.environ:
            pods_away = f"kubectl cordon {' '.join(map(node_of, bad_hosts))} keeps new pods from there"
            advice = f" HINT: {pods_away} (or a nodeAffinity in the manifest)."
        if refusal:
            is_queued = (is_excluded or self._requested == signal.SIGUSR1) and REQUEUE.requeue()
            again = "The job is back in the queue." if is_queued else self._resumption()
            self._report(f"{loss} {refusal}: not restarted. {again}{advice}")
            return False
        lost = f"The run resumes without {len(missing)} of its {self._members.nodes.ranks} ranks"
        who = lost if missing else "All ranks resume"
        self._report(f"{loss} {who} (restart {self._losses}).{advice}")
        return True

    def _resumption(self) -> str:
        """Returns from where the run resumes when the copies in memory are gone, in a sentence."""
        checkpoint, newest = self._newest_checkpoint(), self._newest_state().removesuffix(".json")
        again = "begins anew" if self._life is not None and checkpoint is None else "resumes the run"
        if newest <= (checkpoint.stem if checkpoint else ""):
            return f"The same command {again}."
        start = f" from {checkpoint.name}" if checkpoint else ""
        return f"The same command {again}{start}: the copies in memory, up to {newest}, are lost."

    def _report(self, text: str) -> None:
        """Prints a warning, and writes it into the run's log, where it is known."""
        text = text[0].upper() + text[1:]
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} WARNING {text}", file=sys.stderr, flush=True)
        if self._life is not None:
            add_to_log(self._life, "WARNING", text)


def receive(source: socket.socket) -> Message:
    """Returns the next message; {} where the other end is closed."""
    data = b""
    with suppress(ConnectionError):
        data = source.recv(_LONGEST_MESSAGE)
    return cast(Message, json.loads(data)) if data else {}


def supervise(restarts: int, strikes: int) -> int:
    """Runs a fit under a supervisor, and returns the exit code."""
    variables = os.environ
    names = ("WORLD_SIZE", "RANK", "GROUP_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in variables:
        names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_NODES")
    world_size, rank, nodes = (int(variables.get(name) or 0) for name in names)
    memory = make_folder_in_memory()
    try:
        return Supervisor(restarts, strikes, memory, rank, world_size, nodes > 1).run()
    finally:
        if memory is not None:
            shutil.rmtree(memory, ignore_errors=True)
