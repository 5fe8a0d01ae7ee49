"""Starts a run and starts it again: torchrun, Slurm, Ray, Kubernetes, several processes of one host, sweeps."""
