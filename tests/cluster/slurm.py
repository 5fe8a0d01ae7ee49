"""A Slurm on hosts of its own: munged, slurmctld and a slurmd for each host, in a temporary folder.

    with Slurm(3, folder) as slurm:
        job = slurm.submit("scripts/slurm.sbatch", "--nodes=2", cwd=tmp_path, env=...)
        slurm.job(job)["JobState"]               # RUNNING

Nodes n1, n2, ... are the hosts h1, h2, ...; the names of the nodes resolve nowhere, as it happens on real clusters: only
Slurm knows their addresses. The partition 'urgent' preempts jobs of 'main'.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.hosts import Hosts
from tests.cluster.machine import LONG, need, wait_until

# Seconds are short where a cluster's are long: a credential's life, which delays a requeued job, and a node's silence.
_CONF = """
ClusterName=test
SlurmctldHost=h1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MailProg=/bin/true
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SlurmdTimeout=6
MessageTimeout=5
TCPTimeout=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
NodeName=DEFAULT CPUs=4 Gres=gpu:2 State=UNKNOWN
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """A cluster of so many nodes. What needs a shared file system finds it: all hosts share this machine's."""

    def __init__(self, nodes: int, folder: Path) -> None:
        need("slurm-wlm munge", "munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
        self.folder, self.hosts = folder, Hosts(nodes, folder)
        self._environment = {"PATH": os.environ["PATH"], "SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(folder)}

    def __enter__(self) -> "Slurm":
        self.hosts.__enter__()
        try:
            self._configure()
            munge = self.folder / "munge"
            self._daemon(
                0, "munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
                f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
            )  # fmt: skip
            wait_until((munge / "socket").exists, LONG, self.logs)
            self._daemon(0, "slurmctld", "-D", "-i")
            for index in range(len(self.hosts)):
                self.start_node(index)
            ready = f"{len(self.hosts)} idle"
            sinfo = ("sinfo", "-h", "-p", "main", "-o", "%D %T")
            wait_until(lambda: self.run(*sinfo, check=False).strip() == ready, LONG, self.logs, every=0.3)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.__exit__()

    def _configure(self) -> None:
        self.folder.chmod(0o755)  # munged insists
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir(mode=0o755)
        (self.folder / "munge" / "key").write_bytes(os.urandom(1024))
        (self.folder / "munge" / "key").chmod(0o400)
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={host.name} NodeAddr={host.address}" for i, host in enumerate(self.hosts, 1)
        )
        (self.folder / "slurm.conf").write_text(_CONF.format(folder=self.folder, nodes=nodes))
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")  # believed

    def _daemon(self, index: int, *words: str) -> None:
        with (self.folder / "daemons.txt").open("ab") as output:
            self.hosts[index].start(words, output, self.folder, self._environment)

    def start_node(self, index: int) -> None:
        self._daemon(index, "slurmd", "-D", "-N", f"n{index + 1}")

    def lose_node(self, index: int) -> None:
        """slurmd, its slurmstepds and all tasks end at once."""
        self.hosts[index].kill()

    def logs(self) -> str:
        return "".join(
            f"--- {file.name}\n{file.read_text()[-2000:]}"
            for file in (self.folder / "daemons.txt", *sorted(self.folder.glob("slurm*.log")))
        )

    def why(self, job: str, log: Path) -> str:
        """Returns what is known of a job: for the message of a test that waits for it."""
        return f"{self.job(job)}\n{log.read_text() if log.exists() else ''}\n{self.logs()}"

    def run(self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, check: bool = True) -> str:
        """What a command (srun, scontrol, ...) prints, run on the first host."""
        process = self.hosts[0].start(words, subprocess.PIPE, cwd or self.folder, {**(env or {}), **self._environment})
        output = process.communicate(timeout=LONG)[0].decode()
        assert process.returncode == 0 or not check, output
        return output

    def submit(self, *words: str, cwd: Path, env: Mapping[str, str]) -> str:
        """The number of a new batch job."""
        return self.run("sbatch", "--parsable", *words, cwd=cwd, env=env).strip().splitlines()[-1]

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, Reason, NodeList, ..."""
        words = self.run("scontrol", "show", "job", "-o", number).split()
        return {name: value for name, _, value in (field.partition("=") for field in words)}
