"""The loops of an evaluation: Lightning's, whose loaders are cut to the user's limits in this project's units."""

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from project.data.dealing import DealtLoader
from project.errors import UserError
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
        loaders, stage = loaders_of(self.trainer), "test" if self.trainer.testing else "val"
        with loaders.limits_of_loop(stage):
            super().setup_data()
            combined = self._combined_loader
            if combined is not None and loaders.deal_together(combined, stage) and not self.trainer.sanity_checking:
                limit = getattr(self.trainer, f"limit_{stage}_batches")  # a number where the code is only tried
                own = [len(loader) for loader in combined.flattened]
                self.max_batches[:] = [min(count, limit) if isinstance(limit, int) else count for count in own]
        for loader in () if combined is None else combined.flattened:
            if isinstance(loader, DealtLoader):
                loader.taken.clear()  # of an evaluation that ended before this loader
        self._refuse_unknown_loaders()

    def _refuse_unknown_loaders(self) -> None:
        """Refuses several loaders out of which a step itself takes its batches, where the ranks have not as many of each: all
        ranks meet at the end of a loader, and Lightning sees it a batch too late, or never.
        """
        step = getattr(self.trainer.lightning_module, "test_step" if self.trainer.testing else "validation_step")
        several = self._combined_loader is not None and self.num_dataloaders > 1
        if several and typed(self.trainer).exact and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise UserError(
                f"{step.__name__}(dataloader_iter) takes batches of {self.num_dataloaders} loaders, and nobody sees where one "
                "ends: trainer.exact can't be kept. HINT: take the batches as arguments (batch, batch_idx, dataloader_idx)."
            )


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
