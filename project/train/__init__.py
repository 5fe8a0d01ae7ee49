"""HOW a step is taken."""
