"""Starts a run and starts it again: torchrun, Slurm, Ray, Kubernetes, sweeps.

`launcher.py` detects who launched this process; `early_start.py` starts the ranks of one host under plain Python,
`torchrun_agent.py` those of several; `supervisor.py` starts ranks again when one is lost; `ray/` and `kubernetes.py` are
engines; `sweep.py` lists the trials of a search. A run is a command line, a folder and an exit code here: the room must not
know the model, the data, the step or what a checkpoint holds. What starts before PyTorch is loaded imports nothing heavy.
"""
