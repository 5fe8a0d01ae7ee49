"""The project's image, built from its Dockerfile, and containers of it, as runc starts them. No registry, no download.

    image = Image(folder)
    container = Container(image, folder / "run", user=4711, shm="64m", cores=1)
    container.run("python", "-m", "project", "doctor", ...).code

The base is this machine's Python with the few programs that the Dockerfile and scripts/launch.sh call. The libraries are
mounted from where the tests have theirs, while it is built, too: pip finds all that it is to install.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.cluster.machine import command, need
from tests.conftest import PATIENCE, Run

_PROGRAMS = "sh bash env cat mkdir chown chmod dirname uname cksum ls rm tr wc head tail grep sed cut cp id hostname nproc"
_LIBRARIES = ("stdc++.so.6", "gcc_s.so.1", "nss_dns.so.2", "pthread.so.0", "rt.so.1", "dl.so.2", "util.so.1")
_UNUSED = ("__pycache__", "test", "site-packages", "idlelib", "tkinter", "ensurepip")
_BASE = "FROM scratch\nADD base.tar /\nENV PATH=/usr/local/bin:/usr/bin:/bin\n"
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = f"/usr/local/lib/{_PYTHON}/site-packages"
"""Where an image has its libraries."""


def _tree(folder: Path) -> None:
    """The files of the base."""
    prefix = Path(sys.base_prefix)

    def left_out(place: str, names: list[str]) -> set[str]:
        scripts = place.endswith("/bin")
        odd = {name for name in names if name.startswith("config-") or name.endswith(".a")}
        return odd | {name for name in names if name in _UNUSED or (scripts and not name.startswith("python"))}

    for name in ("bin", "lib", "lib64", "sbin"):
        (folder / "usr" / name).mkdir(parents=True)
        (folder / name).symlink_to(f"usr/{name}")
    for part in ("bin", "lib"):
        shutil.copytree(prefix / part, folder / "usr/local" / part, symlinks=True, ignore=left_out)
    (folder / PACKAGES.lstrip("/")).mkdir()
    if not (python := folder / "usr/local/bin/python").exists():
        python.symlink_to(_PYTHON)
    programs = [path for program in _PROGRAMS.split() if (path := shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin"))]
    modules = [*map(str, prefix.glob(f"lib/{_PYTHON}/lib-dynload/*.so")), str(prefix / "bin" / _PYTHON)]
    listed = subprocess.run(["ldd", *programs, *modules], capture_output=True, text=True).stdout
    shared = set(re.findall(r"(/\S+) \(0x", listed))
    system = next(Path(library).parent for library in shared if "/libc.so" in library)
    for file in {*programs, *shared, *(str(system / f"lib{library}") for library in _LIBRARIES)}:
        if not Path(file).is_relative_to(prefix):
            target = folder / file.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    for name in ("tmp", "proc", "sys", "dev", "etc"):
        (folder / name).mkdir()
    (folder / "tmp").chmod(0o1777)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\n")
    (folder / "etc/ld.so.conf").write_text("/usr/local/lib\n")
    command("/sbin/ldconfig", "-r", str(folder))


class Image:
    """Built from a checkout, in a store of its own."""

    def __init__(self, folder: Path) -> None:
        need("buildah runc", "buildah", "runc", "ldd", "tar")
        self.folder = folder
        self.packages = Path(sysconfig.get_path("purelib"))
        # chroot: no container within the build. This kind of machine may itself be one.
        self._environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "XDG_RUNTIME_DIR": str(folder)}
        (folder / "base").mkdir()
        _tree(folder / "base")
        command("tar", "-C", str(folder / "base"), "-cf", str(folder / "base.tar"), ".")
        shutil.rmtree(folder / "base")
        (folder / "Dockerfile.base").write_text(_BASE)
        self._buildah("bud", "-q", "-t", "base", "-f", str(folder / "Dockerfile.base"), str(folder))

    def _buildah(self, *words: str) -> str:
        places = ("--root", str(self.folder / "store"), "--runroot", str(self.folder / "runroot"))
        return command("buildah", *places, *words, env=self._environment)

    def build(self, checkout: Path, commit: str) -> str:
        """The image's id. Layers that are there already are taken."""
        arguments = ("--build-arg", "BASE=localhost/base", "--build-arg", f"COMMIT={commit}")
        libraries = ("--volume", f"{self.packages}:{PACKAGES}:ro")
        output = self._buildah("bud", "--layers", "-t", "project", *arguments, *libraries, str(checkout))
        assert "Requirement already satisfied: torch" in output or "Using cache" in output, output
        return output.split()[-1]

    def layers(self, image: str) -> list[tuple[str, int]]:
        """Each layer's digest and bytes."""
        pushed = self.folder / f"pushed-{image[:12]}"
        self._buildah("push", "-q", "--disable-compression", image, f"oci:{pushed}:project")
        read = lambda digest: json.loads((pushed / "blobs/sha256" / digest.removeprefix("sha256:")).read_text())  # noqa: E731
        manifest = read(json.loads((pushed / "index.json").read_text())["manifests"][0]["digest"])
        return [(layer["digest"], layer["size"]) for layer in manifest["layers"]]

    def files(self, image: str) -> tuple[Path, dict[str, Any]]:
        """The image's files, in a folder, and its configuration: Env, User, WorkingDir, Cmd."""
        container = self._buildah("from", image).strip()
        place = Path(self._buildah("mount", container).strip())
        config: dict[str, Any] = json.loads(self._buildah("inspect", "--type", "image", image))["OCIv1"]["config"]
        return place, config

    def close(self) -> None:
        self._buildah("rm", "--all")


@dataclass
class Started:
    """A container that runs."""

    name: str
    folder: Path
    output: Path
    process: subprocess.Popen[bytes]

    def text(self) -> str:
        return self.output.read_text()

    def signal(self, name: str) -> None:
        """To PID 1, as `docker stop` and the kubelet do it."""
        command("runc", "--root", str(self.folder / "runc"), "kill", self.name, name)

    def wait(self, seconds: float = PATIENCE) -> Run:
        try:
            code = self.process.wait(seconds)
        except BaseException:
            self.signal("KILL")
            raise
        return Run(code, self.text(), self.folder)


@dataclass
class Container:
    """Started for one command, on a read-only root; /tmp and /app/lightning_logs can be written, and no other place."""

    root: Path
    config: dict[str, Any]
    packages: Path
    folder: Path
    """On this machine: it has the runs."""
    user: int = 1000
    group: int = 0
    shm: str = "64m"
    cores: float = 1.0
    env: dict[str, str] = field(default_factory=dict)
    hostname: str = "4f1c9a7b2d3e"
    writable: bool = True
    """Whether it may write to /app/lightning_logs."""

    _numbers = count(1)

    def start(self, *words: str, **env: str) -> "Started":
        """As PID 1 of a container, with a network of its own that leads nowhere."""
        bundle = self.folder / f"bundle-{next(self._numbers)}"
        bundle.mkdir(parents=True)
        (bundle / "config.json").write_text(json.dumps(self._spec(bundle, words, env)))
        name = f"project-test-{os.getpid()}-{bundle.name}"
        started = ["runc", "--root", str(self.folder / "runc"), "run", "--bundle", str(bundle), name]
        with (bundle / "output.txt").open("w") as output:
            process = subprocess.Popen(started, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        return Started(name, self.folder, bundle / "output.txt", process)

    def run(self, *words: str, **env: str) -> Run:
        return self.start(*words, **env).wait()

    def _spec(self, bundle: Path, words: Sequence[str], env: dict[str, str]) -> dict[str, Any]:
        """What `runc spec` has, with these words, this user, and what is mounted."""
        command("runc", "spec", "--bundle", str(bundle))
        spec: dict[str, Any] = json.loads((bundle / "config.json").read_text())
        known = dict(variable.split("=", 1) for variable in self.config["Env"]) | self.env | env
        spec["process"] |= {
            "terminal": False,
            "user": {"uid": self.user, "gid": self.group},
            "args": list(words),
            "env": [f"{name}={value}" for name, value in known.items()],
            "cwd": self.config["WorkingDir"],
            "capabilities": {},
        }
        runs = self.folder / "lightning_logs"
        runs.mkdir(exist_ok=True)
        bound = [(str(self.packages), PACKAGES, "ro")]
        if self.writable:
            os.chown(runs, self.user, self.group)
            bound.append((str(runs), "/app/lightning_logs", "rw"))
        spec["mounts"] += [
            {"destination": to, "type": "bind", "source": source, "options": ["rbind", how]} for source, to, how in bound
        ]
        spec["mounts"].append({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]})
        (shm,) = [mount for mount in spec["mounts"] if mount["destination"] == "/dev/shm"]
        shm["options"] = ["mode=1777", f"size={self.shm}"]
        spec["linux"]["resources"] = {"cpu": {"quota": int(self.cores * 100_000), "period": 100_000}}
        return spec | {"root": {"path": str(self.root), "readonly": True}, "hostname": self.hostname}
