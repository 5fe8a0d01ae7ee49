"""The loops of an evaluation: Lightning's, whose loaders are cut to the user's limits in this project's units."""

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from project.step.loaders import Loaders
from project.typed import typed


def loaders_of(trainer: Trainer) -> Loaders:
    """Returns what deals out this trainer's loaders."""
    loaders = trainer._data_connector
    assert isinstance(loaders, Loaders)
    return loaders


class Evaluation(_EvaluationLoop):
    """A validation or a test."""

    def setup_data(self) -> None:
        """Sets up the loaders with the user's limit set aside: they are cut already. Notes what training has counted."""
        typed(self.trainer).logged.note_metrics()
        with loaders_of(self.trainer).limits_of_loop("test" if self.trainer.testing else "val"):
            super().setup_data()


class Prediction(_PredictionLoop):
    """A prediction."""

    def setup_data(self) -> None:
        """Sets up the loaders with the user's limit set aside: they are cut already."""
        with loaders_of(self.trainer).limits_of_loop("predict"):
            super().setup_data()


# By which a profiler's report names their times.
Evaluation.__name__, Prediction.__name__ = _EvaluationLoop.__name__, _PredictionLoop.__name__


def install_evaluations(trainer: Trainer) -> None:
    """Replaces the trainer's loops of evaluations with ours."""
    inference = trainer.validate_loop.inference_mode  # not within a fit: what is made so can't be trained with
    trainer.validate_loop = Evaluation(trainer, TrainerFn.VALIDATING, RunningStage.VALIDATING, inference_mode=inference)
    trainer.test_loop = Evaluation(trainer, TrainerFn.TESTING, RunningStage.TESTING, inference_mode=inference)
    trainer.predict_loop = Prediction(trainer, inference_mode=inference)
    within_fit = Evaluation(trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False)
    trainer.fit_loop.epoch_loop.val_loop = within_fit
