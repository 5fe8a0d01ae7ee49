"""Who starts it: what an engine needs to start `python -m project fit`, which stays as it is."""
