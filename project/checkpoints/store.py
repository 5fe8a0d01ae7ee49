"""Copies a run's folder to a store elsewhere (s3://, gs://, another disk), and brings it back to a host that lacks it.

The newest start of a run owns its copy: an older one that is still alive, on a host that was taken for dead, ends.
"""

import logging
import os
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from project.checkpoints.reading import checkpoints_in, delete, is_checkpoint, manifest_of
from project.checkpoints.writing import write_file
from project.cluster.place import host
from project.errors import FaultError, UserError
from project.masking import masked, masked_text
from project.untrusted import dump_yaml, make_folder, read_yaml, shortened

log = logging.getLogger(__name__)

_NAME = re.compile(r"[\w-][\w.=+-]{0,199}", re.ASCII)
_RUNS = "lightning_logs"  # in which a run is known by its name
_OWNER = "owner.txt"
_LONGEST = 500  # bytes of it


class Store:
    """The copy of one run's folder. Only rank 0 has one: it alone writes into that folder, or sees what the others write."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder, self._url = folder, masked_text(url)
        self.failed: str | None = None
        """Why the last copy is not whole."""
        self.owner = ""
        """The newest start of this run, where it is another one."""
        parts = folder.absolute().parts
        name = "/".join(parts[parts.index(_RUNS) + 1 :] if _RUNS in parts[:-1] else parts[-1:])
        try:
            self._files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"The store {self._url} can't be used: {shortened(error)} HINT: checkpoints.copy_to is what fsspec knows."
            ) from error
        for client in ("botocore", "aiobotocore"):  # which tell where they have found each setting
            logging.getLogger(client).setLevel(logging.WARNING)
        if isinstance(self._files, LocalFileSystem):
            self._files.auto_mkdir = True
        self._root = f"{root.rstrip('/')}/{name}"
        self._this_start = f"{host()}, process {os.getpid()} ({secrets.token_hex(8)})"
        self._sent: dict[str, tuple[int, int]] = {}
        self._sender: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def fetch(self) -> None:
        """Brings the run's files here, where the newest checkpoint of the store is of a later position than the folder's."""
        with self._faults("read"):
            stored, here = self._checkpoints(), checkpoints_in(self.folder / "checkpoints")
            if not stored or (here and here[-1].name >= stored[-1]):
                return
            log.info("Brings the run from %s: %s", self._url, stored[-1])
            for name in reversed(stored):
                self._fetch_checkpoint(name)
            for name in self._names(""):
                # config.yaml is the command's, which all ranks have read by now; its copy has no secrets.
                if name != _OWNER and not _is_config(name) and self._files.isfile(self._at(name)):
                    self._get(name)

    def claim(self) -> None:
        """Makes this start the owner of the copy: an older one that is still alive stops."""
        with self._faults("written"):
            self._files.pipe_file(self._at(_OWNER), self._this_start.encode())
            for path in checkpoints_in(self.folder / "checkpoints"):
                if self._has(path):
                    self._sent.update({self._name(file): _version(file) for file in _files_of(path)})

    def send_soon(self) -> None:
        """Copies what has changed, beside the training."""
        if self._pending is None or self._pending.done() or self._pending.running():
            self._sender = self._sender or ThreadPoolExecutor(1, "store")
            self._pending = self._sender.submit(self._send)

    def send(self, seconds: float | None = None) -> None:
        """Copies what has changed, and waits for it, at most so long; what has failed is tried once more."""
        self.send_soon()
        assert self._sender is not None
        last = self._sender.submit(lambda: self._send() if self.failed else None)
        wait([last], seconds)
        self._sender.shutdown(wait=last.done())
        self._sender = self._pending = None

    def check_owner(self) -> None:
        """Raises a FaultError where the run was started again elsewhere, and continues there."""
        if self.owner:
            raise FaultError(f"The run was started again, by {self.owner}, and continues there. This start of it ends.")

    # Here to there ---------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Runs in the thread: copies the run's files and checkpoints, the newest of them first; then removes older ones."""
        before, self.failed = self.failed, None
        try:
            owner = self._files.cat_file(self._at(_OWNER), start=0, end=_LONGEST).decode(errors="replace")
            if owner != self._this_start:
                self.owner = shortened(owner)
                return
            here = checkpoints_in(self.folder / "checkpoints")
            others = [path for path in self.folder.iterdir() if path.is_file() and not path.is_symlink()]
            for path in others:  # first: curves and records go at least as far as any of these checkpoints
                if _NAME.fullmatch(path.name):
                    self._put(path)
            for path in reversed(here):
                for file in _files_of(path):
                    self._put(file)
            kept = {file.name for path in here for file in (path, manifest_of(path))}
            for name in {*self._names("checkpoints")} - kept:  # also a manifest whose checkpoint was removed meanwhile
                if name.startswith("step-"):
                    self._remove(f"checkpoints/{name}")
            for name in {*self._names("")} - {path.name for path in others} - {_OWNER, "checkpoints"}:
                if self._files.isfile(self._at(name)):  # events, say, that a resumed run has written anew
                    self._remove(name)
        except Exception as error:  # each kind of store has errors of its own
            self.failed = _reason(error)
            if before is None:  # once, until it has worked again
                log.warning(
                    "The run's folder can't be copied to %s: %s. Training continues; it is tried again after the next "
                    "checkpoint.",
                    *(self._url, self.failed),
                )

    def _put(self, file: Path) -> None:
        """Copies a file that is new or has changed; skips one that is gone by now."""
        name = self._name(file)
        try:
            version = _version(file)
            if self._sent.get(name) == version:
                return
            if _is_config(file.name):  # which has the secrets, for its owner alone
                self._files.pipe_file(self._at(name), dump_yaml(masked(read_yaml(file))).encode())
            elif isinstance(self._files, LocalFileSystem):  # others show a file when they have all of it
                self._files.put_file(str(file), self._at(f"{name}.tmp"))
                self._files.mv(self._at(f"{name}.tmp"), self._at(name))
            else:
                self._files.put_file(str(file), self._at(name))
            self._sent[name] = version
        except FileNotFoundError:
            if file.exists():
                raise

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm(self._at(name), recursive=True)

    def _has(self, path: Path) -> bool:
        """Returns whether the store has this checkpoint: the same manifest, and a file of the same size."""
        manifest = manifest_of(path)
        with suppress(FileNotFoundError):
            files = [manifest] if path.is_dir() else [manifest, path]
            if all(self._files.size(self._at(self._name(file))) == file.stat().st_size for file in files):
                return bool(self._files.cat_file(self._at(self._name(manifest))) == manifest.read_bytes())
        return False

    # There to here ---------------------------------------------------------------------------------------------------

    def _fetch_checkpoint(self, name: str) -> None:
        """Brings a checkpoint, as one file or as a folder of parts; what is brought gets its name when it is whole."""
        path = self.folder / "checkpoints" / name
        if os.path.lexists(path):
            return
        make_folder(path.parent)
        self._get(self._name(manifest_of(path)))
        if parts := self._names(f"checkpoints/{name}") if self._files.isdir(self._at(f"checkpoints/{name}")) else []:
            staging = path.with_name(f".{name}.part")
            delete(staging)
            staging.mkdir()
            for part in parts:
                self._files.get_file(self._at(f"checkpoints/{name}/{part}"), str(staging / part))
            staging.replace(path)
        else:
            self._get(self._name(path))

    def _get(self, name: str) -> None:
        """Brings a file, whole or not at all, and through no link."""
        write_file(self.folder / name, lambda file: self._files.get_file(self._at(name), str(file.name)))

    # Both ------------------------------------------------------------------------------------------------------------

    def _name(self, file: Path) -> str:
        return file.relative_to(self.folder).as_posix()

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _names(self, folder: str) -> list[str]:
        """Returns the names in a folder of the store, as far as they can be those of a run."""
        self._files.invalidate_cache()
        try:
            entries = self._files.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(name for entry in entries if _NAME.fullmatch(name := entry.rstrip("/").rpartition("/")[2]))

    def _checkpoints(self) -> list[str]:
        """Returns the names of the store's whole checkpoints, the oldest first."""
        names = self._names("checkpoints")
        return [name for name in names if is_checkpoint(name) and manifest_of(Path(name)).name in names]

    @contextmanager
    def _faults(self, what: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise FaultError(
                f"The store {self._url} can't be {what}: {_reason(error)}. HINT: see the address (checkpoints.copy_to) and the "
                "credentials; the same command works when it answers."
            ) from error


def _files_of(path: Path) -> list[Path]:
    """Returns the files of a checkpoint, in the order in which they are written: a part before the manifest that names it; the
    manifest that also describes the file before it, first.
    """
    return [*sorted(path.glob("*")), manifest_of(path)] if path.is_dir() else [manifest_of(path), path]


def _reason(error: Exception) -> str:
    return shortened(masked_text(str(error)) or type(error).__name__)


def _is_config(name: str) -> bool:
    return name.startswith("config") and name.endswith(".yaml")


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
