"""Spreads a network over the ranks: FSDP2, tensor parallelism, and shards in checkpoints."""
