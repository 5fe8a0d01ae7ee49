"""What a manifest's pods would see, on one machine: a kubelet, a Job controller and a headless service's names, in small.

A pod is a network namespace, with an address that no pod before it had, and mount namespaces, one for each container: the
repository lies read-only in /app, as the image has it, all else is read-only, too, but for the volumes, and the process is user
1000 without privileges. Environment, command, volumes, grace and rules come from the manifest.

What it does not have: cgroups (requests and limits do nothing), a scheduler, a registry (PROJECT_PYTHON's libraries are this
machine's), seccomp, ConfigMaps, and the delays of an API server. `backoff` shortens the seconds from a failure to the next pod.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Host
from tests.cluster.machine import wait_until
from tests.cluster.manifests import INDEX
from tests.conftest import ROOT

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "sys", "dev")
_CONTAINER = """
set -e
root=$1 name=$2 cwd=$3 user=$4; shift 4
hostname "$name"
mount -t tmpfs -o mode=755 tmpfs "$root"
bind() { mkdir -p "$root$2"; mount --rbind "$1" "$root$2"; }
while [ "$1" != -- ]; do
  case $1 in
    bind) bind "$2" "$3" ;;
    seen) bind "$2" "$3"; mount -o remount,bind,ro "$root$3" ;;
    link) ln -s "$2" "$root$3" ;;
    memory) mkdir -p "$root$3"; mount -t tmpfs -o "size=$2,mode=1777" tmpfs "$root$3" ;;
    file) mount --bind "$2" "$root$3" ;;
  esac
  shift 3
done
shift
mount -o remount,ro "$root"
exec chroot "$root" sh -c 'cd "$1"; user=$2; shift 2
  exec setpriv --reuid="$user" --regid="$user" --clear-groups --bounding-set=-all --no-new-privs "$@"' sh "$cwd" "$user" "$@"
"""


def _bytes(quantity: str) -> int:
    units = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return int(quantity[:-2]) * units[quantity[-2:]]


@dataclass
class Ended:
    """How a pod ended: the container and its exit code; `disrupted` is the condition DisruptionTarget."""

    index: int
    container: str
    code: int
    disrupted: bool = False
    action: str = ""


class Pod:
    """One pod of a Job; its containers are started one after the other."""

    def __init__(self, cluster: "Cluster", spec: Mapping[str, Any], index: int, host: Host) -> None:
        self.index, self.spec, self._cluster = index, spec, cluster
        self.name, self.address = f"{cluster.name}-{index}", host.address
        self.folder = cluster.folder / f"{self.name}-{host.name}"
        self.folder.mkdir()
        self.hosts_file = self.folder / "hosts"
        self.hosts_file.touch()
        self._host = replace(host, name=self.name, hosts_file=self.hosts_file)
        self.containers = [*spec.get("initContainers", ()), *spec["containers"]]
        self.disrupted, self._deadline = False, float("inf")
        self.process: subprocess.Popen[bytes] | None = None
        self._at = -1

    @property
    def container(self) -> Mapping[str, Any]:
        return dict(self.containers[self._at])

    def log(self, container: str | None = None) -> str:
        """What its containers have printed."""
        return "".join(file.read_text() for file in sorted(self.folder.glob(f"{container or '*'}.log")))

    def _environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        fields = {INDEX: str(self.index), "spec.nodeName": f"node-of-{self.address}", "metadata.name": self.name}
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        # As every container has it, whatever enableServiceLinks says.
        found = {"PATH": path, "HOSTNAME": self.name, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "PYTHONUNBUFFERED": "1"}
        for one in container.get("env", ()):
            source = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            found[one["name"]] = one["value"] if source is None else fields[source]
        return {**found, **self._cluster.extra}

    def _mounts(self, container: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        for name in _SYSTEM:
            if (place := Path("/", name)).is_symlink():
                yield "link", os.readlink(place), f"/{name}"
            elif place.is_dir():
                yield "bind", f"/{name}", f"/{name}"
        yield "seen", str(ROOT), "/app"
        yield "file", str(self.hosts_file), "/etc/hosts"
        yield "file", str(self._cluster.passwd), "/etc/passwd"
        volumes = {one["name"]: one for one in self.spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume, place = volumes[mount["name"]], mount["mountPath"]
            if "persistentVolumeClaim" in volume:
                yield "bind", str(self._cluster.claim(volume["persistentVolumeClaim"]["claimName"])), place
            elif volume["emptyDir"].get("medium") == "Memory":
                yield "memory", str(_bytes(volume["emptyDir"]["sizeLimit"])), place
            else:
                folder = self.folder / mount["name"]
                folder.mkdir(exist_ok=True)
                folder.chmod(0o777)
                yield "bind", str(folder), place
        for python in dict.fromkeys((sys.base_prefix, sys.prefix)):  # after the volumes: it may lie in /tmp
            yield "seen", python, python

    def start_next(self) -> None:
        self._at += 1
        container = self.container
        assert container["securityContext"]["readOnlyRootFilesystem"]
        environment = self._environment(container)
        words = [*container["command"], *container.get("args", ())]
        for name, value in environment.items():
            words = [word.replace(f"$({name})", value) for word in words]
        words = [word.replace("$$(", "$(") for word in words]
        root = self.folder / f"root-{container['name']}"
        root.mkdir()
        mounts = [word for mount in self._mounts(container) for word in mount]
        user = str(self.spec["securityContext"]["runAsUser"])
        what = ["sh", "-c", _CONTAINER, "sh", str(root), self.name, container["workingDir"], user, *mounts, "--", *words]
        enter = ["nsenter", f"--net=/run/netns/{self._host.namespace}", "unshare", "--mount", "--uts"]
        with (self.folder / f"{container['name']}.log").open("ab") as output:
            self.process = subprocess.Popen(
                [*enter, *what], env=environment, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT
            )

    def look(self) -> Ended | None:
        """The kubelet's part: starts what comes next; how the pod has ended, if it has."""
        if self.process is None:
            self.start_next()
            return None
        if time.monotonic() > self._deadline:
            self.kill()
        code = self.process.poll()
        if code is None:
            return None
        self._host.kill()  # a container's processes go with its first
        code = code if code >= 0 else 128 - code
        if code == 0 and self._at + 1 < len(self.containers):
            self.start_next()
            return None
        return Ended(self.index, self.container["name"], code, self.disrupted)

    def delete(self, disrupted: bool = False) -> None:
        """SIGTERM, and after its grace SIGKILL. `disrupted`: by a drained node or a preemption, and not by kubectl."""
        self.disrupted = disrupted
        self._deadline = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def freeze(self) -> None:
        """Its ranks do nothing more, and don't hear that they are to stop."""
        for pid in self._host.pids():
            if b"project" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:4]:
                os.kill(pid, signal.SIGSTOP)

    def kill(self) -> None:
        """All of it at once: its node has lost power, or the kernel wants its memory."""
        self._host.kill()


class Cluster:
    """The pods of one Job, and what the Job controller does about those that end."""

    def __init__(self, hosts: Iterable[Host], folder: Path, job: Mapping[str, Any], backoff: float = 0.5, **extra: str) -> None:
        self.folder, self.spec, self.name = folder, job["spec"], job["metadata"]["name"]
        self.extra, self.backoff = extra, backoff
        self._hosts = iter(hosts)
        self.pods: dict[int, Pod] = {}
        self.ended: list[Ended] = []
        self.failures: Counter[int] = Counter()
        self.over: str | None = None
        self.unschedulable: set[int] = set()  # no node has room for these pods
        self._due: dict[int, float] = {}
        self._done: set[int] = set()
        self.passwd = folder / "passwd"
        self.passwd.write_text("root:x:0:0::/:/bin/sh\ntrain:x:1000:1000::/tmp:/bin/sh\n")

    def __enter__(self) -> "Cluster":
        for index in range(self.spec["parallelism"]):
            self._due[index] = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods.values():
            pod.kill()
        for pod in self.pods.values():
            if pod.process is not None:
                pod.process.wait(10)

    def claim(self, name: str) -> Path:
        folder = self.folder / "claims" / name
        if not folder.is_dir():
            folder.mkdir(parents=True)
            os.chown(folder, 1000, 1000)  # fsGroup's doing
        return folder

    def log(self, index: int | None = None) -> str:
        """Of all pods that there were, or of those of an index."""
        folders = sorted(
            self.folder.glob(f"{self.name}-{'*' if index is None else index}-*"), key=lambda one: one.stat().st_ctime
        )
        return "".join(f"--- {file}\n{file.read_text()}" for one in folders for file in sorted(one.glob("*.log")))

    def look(self) -> bool:
        """One round of the Job controller. True when the Job is over."""
        for index, at in list(self._due.items()):
            if time.monotonic() >= at and self.over is None and index not in self.unschedulable:
                del self._due[index]
                self._create(index)
        for index, pod in list(self.pods.items()):
            if (ended := pod.look()) is not None:
                del self.pods[index]
                self._judge(ended)
        return self.over is not None and not self.pods

    def _create(self, index: int) -> None:
        pod = Pod(self, self.spec["template"]["spec"], index, next(self._hosts))
        self.pods[index] = pod
        # The service's names, as all pods now see them; in the same files, which are mounted.
        service = self.spec["template"]["spec"]["subdomain"]
        names = "".join(f"{one.address} {one.name}.{service}\n" for one in self.pods.values())
        for one in self.pods.values():
            one.hosts_file.write_text(f"127.0.0.1 localhost\n{one.address} {one.name}\n{names}")
        pod.look()

    def _judge(self, ended: Ended) -> None:
        self.ended.append(ended)
        if ended.code == 0:
            ended.action = "Succeeded"
            self._done.add(ended.index)
            wanted = {int(one["succeededIndexes"]) for one in self.spec["successPolicy"]["rules"]}
            if wanted <= self._done or len(self._done) == self.spec["completions"]:
                self._finish("Complete")
            return
        ended.action = next((rule["action"] for rule in self.spec["podFailurePolicy"]["rules"] if _fits(rule, ended)), "Count")
        if self.over is not None:
            return
        if ended.action == "FailJob":
            self._finish("Failed")
            return
        if ended.action == "Count":
            self.failures[ended.index] += 1
            if self.failures[ended.index] > self.spec["backoffLimitPerIndex"]:
                assert self.spec["maxFailedIndexes"] == 0
                self._finish("Failed")
                return
        self._due[ended.index] = time.monotonic() + self.backoff

    def _finish(self, how: str) -> None:
        self.over = how
        for pod in self.pods.values():
            pod.delete()

    def delete(self) -> None:
        """The Job goes, and its pods with it: kubectl's doing, or JobSet's, which then makes it anew."""
        self._finish("Deleted")

    def wait(self, seconds: float) -> str:
        """How the Job ends."""
        wait_until(self.look, seconds, lambda: f"the Job is not over; ended: {self.ended}\n{self.log()}")
        assert self.over is not None
        return self.over

    def wait_for(self, true: Any, seconds: float) -> None:
        """Until something is true, while the controller works."""
        wait_until(lambda: self.look() or true(), seconds, lambda: f"ended: {self.ended}\n{self.log()}")
        assert true(), f"the Job is {self.over}; ended: {self.ended}\n{self.log()}"


def _fits(rule: Mapping[str, Any], ended: Ended) -> bool:
    if "onPodConditions" in rule:
        return ended.disrupted and any(one["type"] == "DisruptionTarget" for one in rule["onPodConditions"])
    codes = rule["onExitCodes"]
    if codes.get("containerName", ended.container) != ended.container:
        return False
    return (ended.code in codes["values"]) == (codes["operator"] == "In")
