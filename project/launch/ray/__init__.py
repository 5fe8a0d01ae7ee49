"""Runs a fit or a sweep on a Ray cluster."""
