"""WHATEVER HAPPENS: stopping cleanly."""
