"""HOW FAST: our training beside the plain loop of project/bench/plain_ddp.py, in turns."""
