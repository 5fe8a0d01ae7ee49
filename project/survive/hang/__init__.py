"""Ends a run that hangs, and names the rank at fault and the place.

`watchdog.py` is a thread in each rank with a deadline for each step, `heartbeats.py` carries its messages, `flights.py` and
`stacks.py` find out who waits for whom, `verdict.py` ends the run; `warden.py` is a small process beside a rank, which outlives
it. Nothing here may wait for a disk, a device or a peer for long, nor use NCCL or gloo: these are what hangs.
"""
