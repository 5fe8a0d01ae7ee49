"""Train an image classifier on one machine or on many: the same YAML, the same run."""

__version__ = "0.1.0"
