"""Checkpoints: read safely, and what can't be read is said in one line."""

import pickle
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's reader and writer, with `weights_only` on unless it was switched off."""

    def load_checkpoint(
        self, path: _PATH, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        try:
            return super().load_checkpoint(path, map_location, True if weights_only is None else weights_only)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path} holds more than weights and plain values, and reading that can run code: {error}. "
                "HINT: if you trust where it comes from, set weights_only=false."
            ) from error
        except (OSError, EOFError, RuntimeError) as error:
            raise ValueError(
                f"{path} can't be read as a checkpoint: {error}. HINT: it may be cut short; take an older one from "
                "the same folder."
            ) from error
