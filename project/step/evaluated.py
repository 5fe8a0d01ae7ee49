"""Names the micro-batch of an evaluation: by its loader, and by the position of its first sample."""

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.utilities import CombinedLoader

from project.data.dealing import DealtLoader
from project.data.order import MicroBatchSampler
from project.step.micro_batch import MicroBatch
from project.step.position import counts
from project.step.state import step_state

_STAGES = {"sanity_check": "sanity check", "validate": "validation", "test": "test", "predict": "prediction"}


def arriving_key(trainer: Trainer) -> tuple[int, int] | None:
    """Returns the key of the micro-batch that goes to the device, which `StepState.evaluated_key` holds from then on."""
    for number, loader in enumerate(_loaders(trainer)):
        if isinstance(loader, DealtLoader) and loader.taken:
            _, step, within = loader.taken[0]
            return number, loader.keys.order.place(step, within)
    return None


def begin_evaluated_micro_batch(trainer: Trainer, dataloader_idx: int | None) -> int | None:
    """Notes which micro-batch of an evaluation comes now, also of a prediction, which Lightning does not report to its logger
    connector. Returns the number of its samples; None where it was not dealt out by us.

    `dataloader_idx`: None where all loaders are read at the same time; the first that has not ended names the micro-batch.
    """
    state, loaders = step_state(trainer), _loaders(trainer)
    state.evaluated, state.evaluated_key, state.peers_evaluate_more, state.uneven = None, None, False, False
    numbers = range(len(loaders)) if dataloader_idx is None else (dataloader_idx,)
    taken = [
        (number, loader.keys, loader.taken.popleft())
        for number in numbers
        if isinstance(loader := loaders[number], DealtLoader) and loader.taken
    ]
    if not taken or not isinstance(loaders[numbers[0]], DealtLoader):
        return None
    number, keys, key = taken[0]
    longest = max((keys for _, keys, _ in taken), key=_count)
    state.evaluated = MicroBatch(key, order=keys.order)
    state.peers_evaluate_more = len(longest) == key[1] + 1 < longest.order.steps
    state.uneven = longest.order.is_empty(longest.order.steps - 1, longest.order.micro_batches - 1)
    state.evaluated_key = number, keys.order.place(*key[1:])
    return state.evaluated.size


def _count(keys: MicroBatchSampler) -> int:
    return keys.order.batches if keys.order.taken is None else keys.order.taken


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
    return _combined(trainer).flattened


def _combined(trainer: Trainer) -> CombinedLoader:
    loop = trainer._active_loop
    assert loop is not None
    assert loop._combined_loader is not None
    return loop._combined_loader
