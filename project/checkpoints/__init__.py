"""Decides when a checkpoint is written, verified and removed, and which a run reads.

`callback.py` decides when; `files.py` (one file) and `shard_writers.py` (a part by each rank) write under another name, verify,
and rename last; `manifest.py` and `reading.py` read what anybody may have written, by `weights_only` alone; `readable.py`
refuses before the first step what could not be read again. It must not know what the states in a checkpoint mean (resume), nor
why a run ends (survive).
"""
