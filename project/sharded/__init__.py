"""Spreads a network over the ranks: FSDP2, tensor parallelism, shards in checkpoints.

`strategy.py` is Lightning's strategy behind `trainer.strategy: sharded`, and reads and writes a rank's shards; `blocks.py`
chooses what is gathered by itself, `root.py` runs the passes, `shards.py` computes norms over all shards, `meta_build.py`
builds a network in one rank's memory, `refusals.py` names what can't be spread, and `replaced.py` what hangs on parameters. It
must not know when a checkpoint is saved, exact sums, faults, or what is shown.
"""
