"""Keeps sums, gradients, metrics and statistics the same to the last bit on any number of ranks, and refuses what can't be."""
