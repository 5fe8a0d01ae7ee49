"""Saves, restores and checks all of a run's state that a checkpoint holds."""
