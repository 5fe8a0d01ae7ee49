"""The moments of a step at which a callback may act, beside Lightning's hooks."""

from lightning.pytorch import Callback, LightningModule, Trainer


class StepHooks(Callback):
    """A callback with hooks that Lightning does not have. The loop calls those that a callback has."""

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first micro-batch of a step is fetched: all ranks have taken the same steps."""

    def on_fetch_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before a micro-batch is fetched from the loader."""

    def on_fetch_ends(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when a micro-batch was fetched; it lies in the host's memory."""

    def on_step_taken(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when the optimiser has taken its step, within what a graph records."""
