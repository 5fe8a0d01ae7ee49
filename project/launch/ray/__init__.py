"""Runs a fit or a sweep on a Ray cluster.

`verb.py` reads the flags, `cluster.py` connects, `fit.py` places one supervisor for each rank and starts all of them again
after a failure, `search.py` runs the trials of a sweep. A supervisor starts the same `python -m project` as any other launcher:
no other room knows that Ray is there.
"""
