"""Shows what a run does and did: console, curves, report, profiles, fingerprints.

In training, `console.py` is the log, and `progress.py`, `events.py`, `throughput.py`, `fingerprints.py` and `profile.py` are
callbacks and loggers; `notify.py` and `openmetrics.py` tell other programs. Afterwards, `history.py` reads a run's folder,
which may be somebody else's, `report.py` and `side_by_side.py` make the pages of one run and of several from the templates in
`pages/`, and `comparison.py` finds where two runs part. It reads the step and must not steer it: a run without this room
computes the same weights. It knows neither checkpoints, faults nor launchers, and what a login node runs imports no PyTorch.
"""
