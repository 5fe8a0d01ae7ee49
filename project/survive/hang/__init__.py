"""A run that hangs: who is at fault, where, and the end."""
