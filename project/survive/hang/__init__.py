"""Ends a run that hangs, and names who is at fault, and where."""
