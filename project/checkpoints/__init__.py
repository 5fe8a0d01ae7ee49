"""Decides when a checkpoint is written, verified and removed, and which of them a run reads."""
