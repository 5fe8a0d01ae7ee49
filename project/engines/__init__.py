"""The engines that start a run: what each needs to start `python -m project fit`, which stays as it is."""
