"""WHAT YOU SEE."""
