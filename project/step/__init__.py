"""Takes the steps of a training: loop, micro-batch, position, random numbers, logged values.

`loop.py` is a step from top to bottom; `position.py` is the only cursor; `loaders.py`, `epochs.py` and `evaluation.py` give
Lightning's loops our order; `chance.py` seeds, `logged.py` averages. It knows the order of the samples (data) and nothing of
exact sums, shards, checkpoints, faults or charts: these register with the Trainer.
"""
