"""The models to train, their optimisers and schedules."""

from project.model.classifier import ImageClassifier
from project.model.minires import MiniResNet
from project.model.schedule import WarmupCosine

__all__ = ["ImageClassifier", "MiniResNet", "WarmupCosine"]
