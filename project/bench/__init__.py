"""HOW FAST: our training beside the plain loop of scripts/plain_ddp.py, in turns."""
