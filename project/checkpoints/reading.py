"""Reads a checkpoint: a file or a folder of parts, whole, or of a sharded network this rank's slices."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from project.errors import UserError, as_user_error
from project.parts import Parted, Stored
from project.plain_values import finished, load, plain_values

_SMALL = 1 << 20  # bytes: what is not cut into slices, and would keep the file open, is copied


class SafeCheckpointIO(TorchCheckpointIO):
    """A reader and writer like Lightning's, with `weights_only` on unless it was switched off; it reads folders of parts,
    too.
    """

    slice_of: Callable[[Stored], Any] | None = None
    """What this rank takes of a tensor that lies in parts, where the network is spread; None: all of it. Files are then
    mapped into memory: who takes a slice of a tensor reads no more than that."""

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        safe = True if weights_only is None else weights_only
        try:
            checkpoint: dict[str, Any] = self._read(Path(path), path, map_location, safe)
            if not isinstance(checkpoint, dict):
                raise UserError(f"{path} holds no checkpoint, but a {type(checkpoint).__name__}.")
            return checkpoint
        except pickle.UnpicklingError as error:
            raise as_user_error(
                error,
                f"{path} holds more than weights and plain values, and reading that can run code: {error}. "
                "HINT: if you trust where it comes from, set weights_only=false.",
            ) from error
        except UserError:
            raise
        except FileNotFoundError as error:
            raise as_user_error(error, f"There is no checkpoint {path}.") from error
        except Exception as error:  # whatever a damaged file makes of the reader
            raise as_user_error(
                error,
                f"{path} can't be read as a checkpoint: {error}. HINT: it may be cut short; take an older one from "
                "the same folder.",
            ) from error

    def _read(self, path: Path, address: str | Path, map_location: Any, safe: bool) -> Any:
        """Reads a folder of parts, a file or a remote address; `safe`: runs no code from it."""
        if path.is_dir():
            return Parted(path, load if safe else _load_trusted).checkpoint(self.slice_of or Stored.read)
        if not path.exists() or not safe:  # an address, which Lightning knows how to read, or what is trusted
            with plain_values():
                return finished(super().load_checkpoint(address, map_location, safe))
        if self.slice_of is not None:
            return _copy_small_tensors(load(path))
        return load(path, map_location, mmap=False)


def _load_trusted(path: Path) -> Any:
    """Reads a file that the user trusts: it may run code."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _copy_small_tensors(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint whose small tensors are copies: they no longer keep the mapped file open."""
    copied: dict[str, Any] = apply_to_collection(
        checkpoint, Tensor, lambda tensor: tensor.clone() if tensor.nbytes < _SMALL else tensor
    )
    return copied
