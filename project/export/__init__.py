"""Exports the weights: checked files that load without this package."""
