"""Names the micro-batch of an evaluation: by its loader, and by the position of its first sample."""

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop

from project.data.dealing import DealtLoader
from project.step.micro_batch import MicroBatch
from project.step.position import counts
from project.step.state import step_state

_STAGES = {"sanity_check": "sanity check", "validate": "validation", "test": "test", "predict": "prediction"}


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
    state.evaluated, state.evaluated_key, state.peers_evaluate_more = None, None, False
    loader = _loaders(trainer)[dataloader_idx]
    if not isinstance(loader, DealtLoader) or not loader.taken:
        return None
    _, step, number = key = loader.taken.popleft()
    state.evaluated = MicroBatch(key, order=loader.keys.order)
    state.peers_evaluate_more = len(loader.keys) == step + 1 < loader.keys.order.steps
    span = loader.keys.order.micro_span(step, number)
    state.evaluated_key = dataloader_idx, span[0]
    return span


def note_failure(trainer: Trainer) -> None:
    """Notes where in an evaluation an error was raised: by the time that it is reported, Lightning has reset the stage."""
    state, loop, stage = step_state(trainer), trainer._active_loop, trainer.state.stage
    state.failed_evaluation = ""
    if stage is None or not isinstance(loop, (_EvaluationLoop, _PredictionLoop)):
        return
    batches = counts(loop.batch_progress.current)
    place = f"at its batch {batches.ready}"
    if batches.ready == batches.completed:
        state.evaluated = None
        over = 0 < sum(loop.max_batches) <= batches.ready
        place = "after its last batch" if over else f"before its batch {batches.ready + 1}"
    after = f" after step {trainer.global_step}" if trainer.state.fn == "fit" else ""
    state.failed_evaluation = f"in the {_STAGES[stage.value]}{after}, {place}"


def _loaders(trainer: Trainer) -> list[object]:
    loop = trainer._active_loop
    assert loop is not None
    assert loop._combined_loader is not None
    return loop._combined_loader.flattened
