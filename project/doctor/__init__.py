"""Checks before a run whether hosts and network are fit for it, and forecasts memory.

`doctor.py` lists the checks in their order; `hosts.py`, `links.py` and `training.py` hold them, a function each, which takes an
`Examination` and adds a row to its findings; `memory_forecast.py` computes the bytes that a rank will hold. A check measures
and judges: it must not change the run or its configuration, and no step of a training may call one.
"""
