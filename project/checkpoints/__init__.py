"""Decides when a checkpoint is written, verified and removed, and which a run reads.

`callback.py` decides when; `writing.py` writes under another name (one file, or a part by each rank), verifies, and renames
last; before the first step it refuses what could not be read again. `reading.py` reads what anybody may have written, by
`weights_only` alone, and chooses. `in_memory.py` keeps the newest states in memory, and `exchange.py` brings their parts to the
hosts that need them. It must not know what the states in a checkpoint mean (resume), nor why a run ends (survive).
"""
