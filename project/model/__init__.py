"""Holds the networks and modules that come along, with optimiser and schedule.

`classifier.py` is `ImageClassifier` around any network, `minires.py` MiniResNet, `gpt.py` a plain LightningModule with a small
GPT. They are guests like a user's own: no other room but `cli` may know them, and they must not know ranks, hosts or
checkpoints but for the few attributes that `run.py` names.
"""

from project.model.classifier import ImageClassifier
from project.model.minires import MiniResNet
from project.model.schedule import WarmupCosine

__all__ = ["ImageClassifier", "MiniResNet", "WarmupCosine"]
