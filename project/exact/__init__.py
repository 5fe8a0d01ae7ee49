"""Keeps sums and statistics the same to the last bit on any number of ranks.

`sums.py` adds numbers on a common grid, in which no order shows; `gradients.py`, `batch_norm.py`, `logged.py` and `metrics.py`
use it for what the ranks add up; `checks.py` refuses by name what can't be kept. It knows steps and shards, and must not know
hosts, checkpoint files, faults or what is shown.
"""
