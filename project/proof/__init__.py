"""Tests the promise on a user's YAML: trials are killed, resumed and compared.

`plan.py` shortens the run and lists its trials, `trials.py` forks them, `recorder.py` notes what each step of a trial saw,
`evidence.py` and `states.py` find the first difference between two of them. It looks at a run as a user's callback may: no
other room but `cli` may know it, and nothing in training changes for it.
"""
