"""Stops a run cleanly, whatever happens."""
