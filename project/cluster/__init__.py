"""Describes where a rank runs: host, container, cores, memory, GPU, network.

`rendezvous.py` brings the ranks of several hosts together and names who is missing, `interfaces.py` and `reachability.py` find
the network between them, `environment.py` collects the facts that the doctor compares, `cgroups.py`, `cores.py` and `gpu.py`
read limits, `processes.py` and `oom.py` say how processes end, `signed.py` signs messages. It lies below all others and must
not know any of them: no run, no step, no launcher. What a shell script starts needs the standard library alone.
"""
