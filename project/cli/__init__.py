"""Turns a command line and YAML into a run, and shows runs that exist.

`main.py` builds the parser, the Trainer, the module and the data from YAML on YAML; `config.py` and `complaints.py` report a
wrong key or value in a line; `watching.py`, `report.py`, `same.py`, `profiling.py`, `prove.py`, `runs.py`, `differences.py`,
`schema.py` and `completion.py` are a verb each. What answers without PyTorch reads the keys from their schema (`keys.py`). This
room may import every other, and no other room may import it: what happens in a run must happen from Python, too.
"""
