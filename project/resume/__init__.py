"""Saves, restores and checks all of a run's state that a checkpoint holds.

`checkpoint.py` adds position, sums and the states of each rank to Lightning's checkpoint, and restores them; `attributes.py`
and `rehearsal.py` name what changes in training and lies in no state, `moves.py` what each micro-batch moves; `changes.py`
makes a changed setting take effect and refuses a network that changed its shape. It must not know when or where a
checkpoint is written (checkpoints), nor who starts the run again, and on how many hosts (launch).
"""
