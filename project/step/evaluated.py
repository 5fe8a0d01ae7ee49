"""Names the micro-batch of an evaluation: by its loader, and by the position of its first sample."""

from lightning.pytorch import Trainer

from project.data.dealing import DealtLoader
from project.step.state import step_state


def arriving_key(trainer: Trainer) -> tuple[int, int] | None:
    """Returns the key of the micro-batch that goes to the device, which `StepState.evaluated_key` holds from then on."""
    for number, loader in enumerate(_loaders(trainer)):
        if isinstance(loader, DealtLoader) and loader.taken:
            _, step, within = loader.taken[0]
            return number, loader.keys.order.micro_span(step, within)[0]
    return None


def begin_evaluated_micro_batch(trainer: Trainer, dataloader_idx: int) -> tuple[int, int] | None:
    """Notes which micro-batch of an evaluation comes now, also of a prediction, which Lightning does not report to its logger
    connector. Returns the span of its samples' positions; None where it was not dealt out by us.
    """
    state = step_state(trainer)
    state.evaluated_key, state.peers_evaluate_more = None, False
    loader = _loaders(trainer)[dataloader_idx]
    if not isinstance(loader, DealtLoader) or not loader.taken:
        return None
    _, step, number = loader.taken.popleft()
    state.peers_evaluate_more = len(loader.keys) == step + 1 < loader.keys.order.steps
    span = loader.keys.order.micro_span(step, number)
    state.evaluated_key = dataloader_idx, span[0]
    return span


def _loaders(trainer: Trainer) -> list[object]:
    loop = trainer._active_loop
    assert loop is not None
    assert loop._combined_loader is not None
    return loop._combined_loader.flattened
