"""How a step is taken: the loop, the micro-batch at hand, the position, random numbers, and what is logged.

It knows the order of the samples (data) and nothing of exact sums, shards, checkpoints, faults or charts: these register with
the Trainer.
"""
